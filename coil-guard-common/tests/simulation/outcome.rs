//! What came of a packet, counted and held to its mode.

use coil_guard_common::{
    abi::{is_rewrite_port, mode},
    counters::Reason,
    decide::{Outcome, is_reserved_port},
};

use super::sim::{Packet, Sim};

impl Sim {
    pub(crate) fn count(&mut self, outcome: Outcome) {
        let tally = &mut self.tally;
        match outcome.reason {
            Reason::Drained => tally.drained += 1,
            Reason::Moved => tally.moved += 1,
            Reason::Settling => tally.settling += 1,
            Reason::NotDrained => tally.not_drained += 1,
            Reason::NoLive => tally.no_live += 1,
            Reason::Contended => tally.contended += 1,
            Reason::Repaired => tally.repaired += 1,
            Reason::WouldMove => tally.would_move += 1,
            Reason::Rewritten => tally.rewritten += 1,
            Reason::NewPort => tally.new_port += 1,
            Reason::HeldByAffinity => tally.held += 1,
            Reason::NotMoved => tally.not_moved += 1,
            _ => {}
        }
        tally.moved += u64::from(outcome.moved);
    }

    /// One reason per packet, one of the mode's, and no port but the drain port.
    pub(crate) fn check_outcome(&mut self, packet: &Packet, mode: u8, outcome: Outcome) {
        use Reason::{
            Contended, Created, Cut, Drained, Healthy, HeldByAffinity, LeftToCilium, Moved, NewPort, NoLive,
            NotDrained, NotMoved, Repaired, ReservedPort, Rewritten, Settling, WouldMove,
        };
        let allowed = match mode {
            mode::AUDIT => {
                matches!(outcome.reason, Healthy | LeftToCilium | WouldMove | NoLive | ReservedPort)
            }
            mode::RESET => matches!(
                outcome.reason,
                Healthy | LeftToCilium | Moved | Created | Repaired | NoLive | Contended | ReservedPort
            ),
            mode::REWRITE => matches!(
                outcome.reason,
                Healthy
                    | LeftToCilium
                    | Rewritten
                    | NewPort
                    | HeldByAffinity
                    | NotMoved
                    | NoLive
                    | ReservedPort
            ),
            _ => matches!(
                outcome.reason,
                Healthy
                    | Moved
                    | Created
                    | Repaired
                    | NoLive
                    | Contended
                    | ReservedPort
                    | Drained
                    | NotDrained
                    | Cut
                    | Settling
            ),
        };
        if !allowed {
            self.fail(format!("mode {mode} answers {:?}", outcome.reason));
        }
        let sent = packet.sent_port.to_be_bytes();
        let allowed = match mode {
            mode::DRAIN => is_reserved_port(sent),
            mode::REWRITE => is_rewrite_port(sent),
            _ => false,
        };
        if outcome.source_port.is_some() && !allowed {
            self.fail(format!("mode {mode} sends from port {}", packet.sent_port));
        }
        if outcome.reason == Contended && !packet.disturbed {
            self.fail("contended though nothing else happened".into());
        }
        if outcome.reason == Drained && outcome.source_port.is_none() {
            self.fail("drained from the packet's own port".into());
        }
        if (outcome.would_drain && mode != mode::AUDIT) || (outcome.cut && mode != mode::DRAIN) {
            self.fail(format!("mode {mode} has {outcome:?}"));
        }
    }
}
