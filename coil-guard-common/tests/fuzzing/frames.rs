//! Any bytes as a frame: what must hold whatever they are.
//!
//! The tests here drive it with a seeded mutator, the target in `fuzz/` with libFuzzer.

#[path = "reference.rs"]
mod reference;

use coil_guard_common::{
    abi::{FragmentKey, InnerFlowKey},
    cilium::PROTO_UDP,
    counters::Reason,
    inner::{self, FlowPacket, Fragment},
    packet::{Address as _, FouPacket, parse},
};

/// The FoU port of all packets here, network order.
pub(crate) const FOU_PORT: [u8; 2] = 5555u16.to_be_bytes();

/// An inner flow key of zeros.
pub(crate) const NO_FLOW: InnerFlowKey = InnerFlowKey {
    service: [0; 16],
    client: [0; 16],
    source: [0; 16],
    destination: [0; 16],
    service_port: [0; 2],
    source_port: [0; 2],
    destination_port: [0; 2],
    protocol: 0,
    pad: 0,
};

/// A fragment key of zeros.
pub(crate) const NO_FRAGMENT: FragmentKey = FragmentKey {
    client: [0; 16],
    source: [0; 16],
    destination: [0; 16],
    identification: [0; 4],
    protocol: 0,
    pad: [0; 3],
};

/// The inner flow of the packet whose IP header is at `offset`.
pub(crate) fn inner_flow(frame: &[u8], offset: u32) -> (InnerFlowKey, FragmentKey, FlowPacket, Fragment) {
    // Whatever a key was used for before shows if it is not overwritten.
    let (mut key, mut fragment_key) = (NO_FLOW, NO_FRAGMENT);
    (key.source, key.destination, key.source_port, key.protocol) = ([0xaa; 16], [0xaa; 16], [0xaa; 2], 0xaa);
    key.destination_port = [0xaa; 2];
    let (packet, fragment) = inner::parse(&frame, offset, &mut key, &mut fragment_key);
    (key, fragment_key, packet, fragment)
}

/// A frame as it leaves a pod.
pub(crate) fn frame(bytes: &[u8]) {
    let ours = parse(&bytes, FOU_PORT);
    let expected = reference::outer(bytes, FOU_PORT);
    let inner = match ours {
        Ok(FouPacket::V4(outer)) => {
            check_outer(
                &expected,
                outer.source.mapped(),
                outer.destination.mapped(),
                outer.source_port,
                outer.udp,
            );
            outer.inner()
        }
        Ok(FouPacket::V6(outer)) => {
            check_outer(&expected, outer.source, outer.destination, outer.source_port, outer.udp);
            outer.inner()
        }
        Err(reason) => {
            assert!(
                matches!(
                    reason,
                    Reason::NotFou | Reason::Malformed | Reason::OuterFragment | Reason::ExtensionHeaders
                ),
                "{reason:?}"
            );
            assert!(!matches!(expected, reference::Outer::Fou { .. }), "{reason:?} against {expected:?}");
            return;
        }
    };
    check_inner(bytes, inner);
}

fn check_outer(
    expected: &reference::Outer,
    source: [u8; 16],
    destination: [u8; 16],
    port: [u8; 2],
    udp: u32,
) {
    let ours = reference::Outer::Fou { source, destination, source_port: port, udp };
    assert_eq!(ours, *expected);
}

/// An inner packet.
pub(crate) fn check_inner(bytes: &[u8], offset: u32) {
    let (key, _, packet, fragment) = inner_flow(bytes, offset);
    assert_eq!((key.service, key.client, key.service_port, key.pad), ([0; 16], [0; 16], [0; 2], 0));
    if packet == FlowPacket::Opening || packet == FlowPacket::Closing {
        assert_eq!(key.protocol, 6);
        assert_ne!(fragment, Fragment::Later);
    }
    if fragment == Fragment::Later {
        assert_eq!((key.source_port, key.destination_port), ([0; 2], [0; 2]));
    }
    let Some(expected) = reference::inner(bytes.get(offset as usize..).unwrap_or_default()) else { return };
    assert_eq!(fragment, Fragment::Whole, "{expected:?}");
    assert_eq!(
        (key.source, key.destination, key.source_port, key.destination_port, key.protocol),
        (
            expected.source,
            expected.destination,
            expected.source_port,
            expected.destination_port,
            expected.protocol
        )
    );
    assert_eq!(packet, expected.packet, "{expected:?}");
    assert_eq!(key.protocol == PROTO_UDP, packet == FlowPacket::Stateless);
}
