//! A world that answers whatever the bytes say, also what no world would: what must hold even so.
//!
//! The tests here drive it with a seeded mutator, the target in `fuzz/` with libFuzzer.

use coil_guard_common::{
    abi::{
        BackendMark, FLOW_DRAINED, FLOW_ENDED, FOR_EVER, InnerFlow, PIN_UNSEEN, PinnedPort, Previous,
        is_return_port, is_rewrite_port, mode,
    },
    counters::Reason,
    decide::{
        Backend, DrainChange, Entry, MAX_SLOTS, Master, State, World, decide, drain_port, is_reserved_port,
        shortcut,
    },
    inner::FlowPacket,
};

/// Network order.
const FOU_PORT: [u8; 2] = 5555u16.to_be_bytes();
/// More than any packet takes, and few enough for a kernel.
const MOST_CALLS: u32 = 250;
const NOW: u64 = 1 << 40;
const REV_NAT: [u8; 2] = [0, 1];

struct Bytes<'a> {
    bytes: &'a [u8],
    calls: u32,
    mode: u8,
    port: [u8; 2],
    flow_packet: FlowPacket,
    fresh: u64,
    /// A slot that was asked for was missing.
    missing: bool,
}

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        match self.bytes.split_first() {
            Some((byte, rest)) => {
                self.bytes = rest;
                *byte
            }
            None => 0,
        }
    }

    fn call(&mut self) -> u8 {
        self.calls += 1;
        assert!(self.calls <= MOST_CALLS, "no end");
        self.next()
    }

    fn id(&mut self) -> u32 {
        match self.next() {
            byte @ 0..=199 => u32::from(byte % 5),
            200..=230 => 4096 + 2,
            231..=245 => u32::MAX,
            byte => u32::from(byte) << 16,
        }
    }

    fn time(&mut self) -> u64 {
        match self.next() % 8 {
            0 => 0,
            1 => NOW - 121_000_000_000,
            2 => NOW - 1_000_000_001,
            3 => NOW - 19_000_000,
            4 => NOW,
            5 => NOW + 1,
            6 => NOW + 60_000_000_000,
            _ => FOR_EVER,
        }
    }

    fn address(&mut self) -> [u8; 16] {
        [self.next() % 3; 16]
    }

    fn write(&mut self, port: [u8; 2], id: u32) -> bool {
        assert!(!matches!(self.mode, mode::AUDIT | mode::REWRITE), "mode {} writes", self.mode);
        let own = port == self.port;
        assert!(!own || !is_reserved_port(port), "put under the reserved port {port:?}");
        assert!(own || (self.mode == mode::DRAIN && port == drain_port(id)), "put {id} under {port:?}");
        self.call() & 3 != 0
    }
}

impl World for Bytes<'_> {
    fn now(&self) -> u64 {
        NOW
    }
    fn client_port(&self) -> [u8; 2] {
        self.port
    }
    fn fou_port(&self) -> [u8; 2] {
        FOU_PORT
    }
    fn spread(&self, with_port: bool) -> u32 {
        u32::MAX - u32::from(with_port)
    }
    fn slot(&mut self, slot: u16) -> Option<u32> {
        assert_ne!(slot, 0, "the master is no slot");
        self.missing |= self.bytes.first().is_none_or(|byte| byte & 7 == 0);
        (self.call() & 7 != 0).then(|| self.id())
    }
    fn backend(&mut self, _: u32) -> Option<Backend> {
        let byte = self.call();
        (byte & 7 != 0).then(|| Backend { address: self.address(), state: byte >> 3 & 3 | byte >> 7 << 2 })
    }
    fn affinity(&mut self, _: &Master) -> Option<u32> {
        (self.call() & 1 == 0).then(|| self.id())
    }
    fn entry(&mut self, port: [u8; 2]) -> Option<Entry> {
        assert!(
            port == self.port
                || (self.mode == mode::DRAIN && is_reserved_port(port))
                || (self.mode == mode::REWRITE && is_rewrite_port(port)),
            "read under {port:?}"
        );
        let byte = self.call();
        (byte & 3 != 0).then(|| Entry {
            backend_id: u64::from(self.id()) | if byte > 250 { 1 << 32 } else { 0 },
            rev_nat_index: if byte > 240 { [9, 9] } else { REV_NAT },
        })
    }
    fn create(&mut self, port: [u8; 2], _: &Master, id: u32) -> bool {
        self.write(port, id)
    }
    fn repair(&mut self, port: [u8; 2], _: &Entry, _: &Master, id: u32) -> bool {
        self.write(port, id)
    }
    fn swap(&mut self, port: [u8; 2], _: u64, to: u32) -> bool {
        self.write(port, to)
    }
    fn keep_replies(&mut self, port: [u8; 2], _: &Master, id: u32) {
        assert_eq!((self.mode, port, self.port), (mode::DRAIN, drain_port(id), FOU_PORT));
    }
    fn replies_are_kept(&mut self, port: [u8; 2], id: u32) -> bool {
        assert_eq!((self.mode, port, self.port), (mode::DRAIN, drain_port(id), FOU_PORT));
        self.call() & 1 == 0
    }
    fn mark(&mut self, _: &[u8; 16]) -> Option<BackendMark> {
        let byte = self.call();
        (byte & 3 != 0).then(|| BackendMark {
            keep_until: self.time(),
            valid_until: self.time(),
            since: self.time(),
            state: byte >> 2 & 7,
            pad: [0; 3],
            seen_before: 0,
        })
    }
    fn only_ready_marks(&mut self) -> bool {
        self.call() & 1 != 0
    }
    fn heartbeat_fresh(&mut self) -> u64 {
        self.fresh
    }
    fn leaving_since(&mut self, _: &[u8; 16], _: u32, _: bool) -> u64 {
        self.call();
        self.time().min(NOW)
    }
    fn unmarked_drain(&self) -> u64 {
        FOR_EVER
    }
    fn previous(&mut self) -> Option<Previous> {
        (self.call() & 1 == 0).then(|| Previous {
            backend_address: self.address(),
            moved_at: self.time(),
            backend_id: self.id(),
            generation: 0,
        })
    }
    fn affinity_match(&mut self, _: &Master, _: u32) -> bool {
        self.call() & 1 == 0
    }
    fn pin(&mut self) -> Option<PinnedPort> {
        let byte = self.call();
        (byte & 3 != 0).then(|| PinnedPort {
            given_at: self.time(),
            stuck_since: self.time(),
            next_round: self.time(),
            left: self.id(),
            generation: 0,
            port: (u16::MAX - u16::from(byte)).to_be_bytes(),
            tries: self.next() % 10,
            rounds: self.next(),
            skips: self.next(),
            flags: self.next() & PIN_UNSEEN,
            pad: [0; 2],
        })
    }
    fn set_pin(&mut self, pin: &PinnedPort) -> bool {
        assert_eq!(self.mode, mode::REWRITE);
        assert!(pin.given_at == 0 || is_rewrite_port(pin.port), "{pin:?}");
        self.call() & 7 != 0
    }
    fn is_returning(&mut self) -> bool {
        assert_eq!(self.mode, mode::REWRITE);
        self.call() & 1 == 0
    }
    fn note_return(&mut self, port: [u8; 2]) -> bool {
        assert!(is_return_port(port), "{port:?}");
        self.call() & 7 != 0
    }
    fn set_previous(&mut self, _: u32, _: u64) {
        assert_ne!(self.mode, mode::AUDIT);
        self.call();
    }
    fn report(&mut self, _: u8, _: u32, _: u32) {
        self.call();
    }
    fn flow_packet(&self) -> FlowPacket {
        self.flow_packet
    }
    fn flow(&mut self) -> Option<InnerFlow> {
        let byte = self.call();
        (byte & 3 != 0).then(|| InnerFlow {
            backend_address: self.address(),
            last_seen: self.time(),
            backend_id: self.id(),
            generation: 0,
            flags: u32::from(byte >> 2) & (FLOW_DRAINED | FLOW_ENDED),
            pad: 0,
        })
    }
    fn remember(&mut self, _: u32, _: u32) {
        assert_ne!(self.mode, mode::RESET);
        self.call();
    }
    fn memory_since(&self) -> u64 {
        NOW - 200_000_000_000
    }
    fn count_drain(&mut self, _: &[u8; 16], _: DrainChange) {
        assert_eq!(self.mode, mode::DRAIN);
        self.call();
    }
}

/// One or more packets, one after the other over the same state.
pub(crate) fn packets(bytes: &[u8]) {
    let mut world = Bytes {
        bytes,
        calls: 0,
        mode: 0,
        port: [0; 2],
        flow_packet: FlowPacket::Stateless,
        fresh: 0,
        missing: false,
    };
    let mut state = State::new();
    while !world.bytes.is_empty() {
        let (what, mode) = (world.next(), world.next() % 6);
        (world.mode, world.calls, world.fresh) = (mode, 0, u64::from(what & 1));
        world.port = match what >> 1 & 7 {
            0 => [0, 80],
            1 => drain_port(2),
            2 => [0xff, 0xff],
            _ => FOU_PORT,
        };
        world.flow_packet =
            [FlowPacket::Opening, FlowPacket::Closing, FlowPacket::Established, FlowPacket::Stateless]
                [usize::from(what >> 4 & 3)];
        let count = [0, 1, 3, u16::MAX][usize::from(what >> 6)];
        state.master = Master { rev_nat_index: REV_NAT, count, affinity: what & 0x20 != 0 };
        world.missing = false;
        if shortcut(&mut world, REV_NAT, mode).is_some() {
            assert!(matches!(mode, mode::AUDIT | mode::RESET | mode::DRAIN));
            continue;
        }
        decide(&mut world, &mut state, mode);
        if state.outcome.reason == Reason::LeftToCilium && mode != mode::REWRITE {
            assert!(
                count <= MAX_SLOTS && !world.missing,
                "left to Cilium though not every slot is known to be usable"
            );
        }
        check(&state, mode);
    }
}

fn check(state: &State, mode: u8) {
    let outcome = state.outcome;
    match mode {
        mode::AUDIT | mode::RESET => {
            assert_eq!((outcome.source_port, outcome.cut), (None, false));
            assert_ne!(outcome.reason, Reason::NotGuarded);
        }
        mode::DRAIN => {
            let reserved = outcome.source_port.is_none_or(is_reserved_port);
            assert!(reserved && !outcome.would_drain, "{outcome:?}");
            assert_ne!(outcome.reason, Reason::NotGuarded);
        }
        mode::REWRITE => {
            let given = outcome.source_port.is_none_or(is_rewrite_port);
            assert!(given && !outcome.cut && !outcome.would_drain, "{outcome:?}");
            assert!(outcome.reason != Reason::NewPort || outcome.source_port.is_some(), "{outcome:?}");
        }
        _ => assert_eq!((outcome.reason, outcome.source_port), (Reason::NotGuarded, None)),
    }
    assert!(mode != mode::AUDIT || outcome.reason != Reason::Moved);
    assert!(mode == mode::AUDIT || outcome.reason != Reason::WouldMove, "{outcome:?}");
    assert!(outcome.reason != Reason::Drained || outcome.source_port.is_some());
}
