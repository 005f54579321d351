//! Symmetric replies of mode `rewrite`: who does what to which packet.
//!
//! Kernel FoU answers to the FoU port, whatever port a packet came from. A client whose packets have another source port
//! then gets replies of which neither its conntrack nor its policy knows. So the egress pod's side sends them to the port
//! that the packets came from, where the client's side says that it can turn them back ([`crate::abi::is_return_port`]), and
//! the client's side gives them the FoU port again before its FoU socket sees them.

use crate::abi::{ANSWER_VALID_FOR, Answer, Return, is_return_port};

/// What a packet that arrives at an egress pod says about where its client wants replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It is not a packet of a tunnel.
    Nothing,
    /// At its source port.
    Port,
    /// At the FoU port.
    FouPort,
}

/// See [`Heard`]. Ports in network order.
#[inline(always)]
#[must_use]
pub const fn heard(source_port: [u8; 2], destination_port: [u8; 2], fou_port: [u8; 2]) -> Heard {
    if u16::from_be_bytes(destination_port) != u16::from_be_bytes(fou_port) {
        Heard::Nothing
    } else if is_return_port(source_port) {
        Heard::Port
    } else {
        Heard::FouPort
    }
}

/// Whether a packet that an egress pod sends is a reply of kernel FoU to a client of an Egress with a fixed port. Replies of
/// an Egress with `fouSourcePortAuto` come from other ports, match no conntrack entry in any case, and are left alone.
#[inline(always)]
#[must_use]
pub const fn is_answer(source_port: [u8; 2], destination_port: [u8; 2], fou_port: [u8; 2]) -> bool {
    let fou_port = u16::from_be_bytes(fou_port);
    u16::from_be_bytes(source_port) == fou_port && u16::from_be_bytes(destination_port) == fou_port
}

/// The port to which a reply goes, by what was learnt of its client.
#[inline(always)]
#[must_use]
pub const fn answer_port(learnt: Answer, now: u64) -> Option<[u8; 2]> {
    // The time was one second coarse when it was noted, and both are as of the last tick.
    if now.saturating_sub(learnt.last_seen) <= ANSWER_VALID_FOR && is_return_port(learnt.port) {
        Some(learnt.port)
    } else {
        None
    }
}

/// Whether a packet that arrives at a client pod can be a reply to a port that it was given.
#[inline(always)]
#[must_use]
pub const fn may_be_returned(source_port: [u8; 2], destination_port: [u8; 2], fou_port: [u8; 2]) -> bool {
    u16::from_be_bytes(source_port) == u16::from_be_bytes(fou_port) && is_return_port(destination_port)
}

/// Whether it is one: `given` is what its destination port was given for. A reply that Cilium has translated back comes from
/// the Service; `is_backend` says whether its source is a backend of a guarded Service, for one that it has not.
#[inline(always)]
pub fn is_returned(
    given: &Return,
    generation: u32,
    source: &[u8; 16],
    is_backend: impl FnOnce() -> bool,
) -> bool {
    given.generation == generation && (given.service == *source || is_backend())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{RETURN_PORT_FIRST, REWRITE_PORT_FIRST};

    const FOU: [u8; 2] = 5555u16.to_be_bytes();

    #[test]
    fn the_upper_half_of_the_ports_says_that_replies_can_be_had_there() {
        for port in 0..=u16::MAX {
            let expected = if port >= 65316 { Heard::Port } else { Heard::FouPort };
            assert_eq!(heard(port.to_be_bytes(), FOU, FOU), expected, "{port}");
        }
        assert_eq!(heard(65400u16.to_be_bytes(), 5556u16.to_be_bytes(), FOU), Heard::Nothing);
        assert_eq!(u16::MAX - RETURN_PORT_FIRST + 1, RETURN_PORT_FIRST - REWRITE_PORT_FIRST);
    }

    #[test]
    fn only_replies_from_fou_port_to_fou_port_are_sent_elsewhere() {
        assert!(is_answer(FOU, FOU, FOU));
        assert!(!is_answer(40_000u16.to_be_bytes(), FOU, FOU));
        assert!(!is_answer(FOU, 65400u16.to_be_bytes(), FOU));
    }

    #[test]
    fn what_was_learnt_counts_for_ten_minutes() {
        let learnt = Answer { last_seen: 1_000, port: 65400u16.to_be_bytes(), pad: [0; 6] };
        assert_eq!(answer_port(learnt, 1_000 + ANSWER_VALID_FOR), Some(learnt.port));
        assert_eq!(answer_port(learnt, 1_001 + ANSWER_VALID_FOR), None);
        assert_eq!(answer_port(learnt, 0), Some(learnt.port), "a clock that is a tick behind");
        assert_eq!(answer_port(Answer { port: FOU, ..learnt }, 1_000), None);
    }

    #[test]
    fn a_reply_comes_from_the_service_or_from_a_backend() {
        let given = Return { service: [7; 16], generation: 3, pad: 0 };
        assert!(is_returned(&given, 3, &[7; 16], || unreachable!()));
        assert!(is_returned(&given, 3, &[8; 16], || true));
        assert!(!is_returned(&given, 3, &[8; 16], || false));
        assert!(!is_returned(&given, 4, &[7; 16], || true), "another pod");
    }

    #[test]
    fn packets_to_other_ports_or_from_other_ports_are_no_replies() {
        assert!(may_be_returned(FOU, 65316u16.to_be_bytes(), FOU));
        assert!(!may_be_returned(FOU, 65315u16.to_be_bytes(), FOU));
        assert!(!may_be_returned(FOU, FOU, FOU));
        assert!(!may_be_returned(53u16.to_be_bytes(), 65400u16.to_be_bytes(), FOU));
    }
}
