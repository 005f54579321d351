//! Outer and inner headers of built packets.

mod build;
#[path = "fuzzing/frames.rs"]
mod frames;

use coil_guard_common::{
    abi::{FragmentPorts, v4_mapped},
    counters::Reason,
    inner::{FlowPacket, Fragment, follow_first},
    packet::{FouPacket, Outer, parse},
};

use proptest::prelude::*;

use crate::{
    build::{
        CLIENT4, CLIENT6, DESTINATION, Extension, HOP_BY_HOP, ICMP, ICMPV6, MORE, OUTSIDE4, OUTSIDE6,
        ROUTING, SERVICE4, SERVICE6, TCP, UDP, ethernet, extensions, fou4, fou6, icmp, inners, ipv4, ipv6,
        tcp, udp,
    },
    frames::{FOU_PORT, inner_flow},
};

fn outer(frame: &[u8]) -> Result<FouPacket, Reason> {
    frames::frame(frame);
    parse(&frame, FOU_PORT)
}

/// `udp` as offset from the start of the frame.
fn is_v4(frame: &[u8], source_port: u16, udp: u32) {
    let expected = Outer {
        source: CLIENT4,
        destination: SERVICE4,
        source_port: source_port.to_be_bytes(),
        destination_port: FOU_PORT,
        udp,
    };
    assert_eq!(outer(frame), Ok(FouPacket::V4(expected)));
}

fn is_v6(frame: &[u8], source_port: u16, udp: u32) {
    let expected = Outer {
        source: CLIENT6,
        destination: SERVICE6,
        source_port: source_port.to_be_bytes(),
        destination_port: FOU_PORT,
        udp,
    };
    assert_eq!(outer(frame), Ok(FouPacket::V6(expected)));
}

#[test]
fn fou_is_found_in_every_form_that_coil_and_iproute2_make() {
    is_v4(&fou4(5555, b"inner"), 5555, 34);
    is_v4(&fou4(40000, &[]), 40000, 34);
    is_v6(&fou6(5555, &[Extension::Options(DESTINATION, 0)], b"inner"), 5555, 62);
    is_v6(&fou6(40000, &[], &[]), 40000, 54);
}

#[test]
fn outer_options_and_extension_headers_are_walked() {
    let with_options = ipv4(CLIENT4, SERVICE4, UDP, 0, &[1; 40], &udp(5555, 5555, b"inner"));
    is_v4(&ethernet(0x0800, &with_options), 5555, 74);
    let four = [
        Extension::Options(HOP_BY_HOP, 0),
        Extension::Options(DESTINATION, 3),
        Extension::Options(ROUTING, 0),
        Extension::Fragment(1),
    ];
    is_v6(&fou6(5555, &four, b"inner"), 5555, 54 + 8 + 32 + 8 + 8);
    let five = [Extension::Options(DESTINATION, 0); 5];
    assert_eq!(outer(&fou6(5555, &five, b"inner")), Err(Reason::ExtensionHeaders));
    is_v6(&fou6(5555, &five[..4], b"inner"), 5555, 54 + 32);
    for not_understood in [51, 135, 139, 140] {
        let headers = [Extension::Options(not_understood, 0)];
        assert_eq!(outer(&fou6(5555, &headers, b"inner")), Err(Reason::ExtensionHeaders), "{not_understood}");
    }
}

#[test]
fn outer_first_fragment_has_ports_and_later_ones_have_none() {
    let fragment =
        |bits| ethernet(0x0800, &ipv4(CLIENT4, SERVICE4, UDP, bits, &[], &udp(5555, 5555, &[0; 32])));
    is_v4(&fragment(MORE), 5555, 34);
    for bits in [1, MORE | 1, 0x1fff, 0xffff] {
        assert_eq!(outer(&fragment(bits)), Err(Reason::OuterFragment), "{bits:#x}");
    }
    for bits in [8, 9, 0xfff8] {
        assert_eq!(
            outer(&fou6(5555, &[Extension::Fragment(bits)], b"x")),
            Err(Reason::OuterFragment),
            "{bits:#x}"
        );
    }
}

#[test]
fn what_is_not_fou_passes_as_such() {
    let tunnelled = udp(5555, 5555, b"inner");
    let other = |protocol| ethernet(0x0800, &ipv4(CLIENT4, SERVICE4, protocol, 0, &[], &tunnelled));
    for protocol in (0..=255).filter(|protocol| *protocol != UDP) {
        assert_eq!(outer(&other(protocol)), Err(Reason::NotFou), "{protocol}");
    }
    for ether_type in [0x0806, 0x8100, 0x88a8, 0, 0x8847] {
        let frame = ethernet(ether_type, &ipv4(CLIENT4, SERVICE4, UDP, 0, &[], &tunnelled));
        assert_eq!(outer(&frame), Err(Reason::NotFou), "{ether_type:#x}");
    }
    let other_port = ipv4(CLIENT4, SERVICE4, UDP, 0, &[], &udp(5555, 5556, b"inner"));
    assert_eq!(outer(&ethernet(0x0800, &other_port)), Err(Reason::NotFou));
    let (next, payload) = extensions(&[Extension::Options(DESTINATION, 0)], TCP, &tcp(5555, 5555, 2));
    assert_eq!(outer(&ethernet(0x86dd, &ipv6(CLIENT6, SERVICE6, next, &payload))), Err(Reason::NotFou));
}

#[test]
fn outer_headers_that_contradict_themselves_are_malformed() {
    let good = fou4(5555, b"inner");
    for (at, byte) in [(14, 0x44), (14, 0x40), (14, 0x65), (17, 27)] {
        let mut bad = good.clone();
        bad[at] = byte;
        assert_eq!(outer(&bad), Err(Reason::Malformed), "byte {at} {byte:#x}");
    }
    let good = fou6(5555, &[Extension::Options(DESTINATION, 0)], b"inner");
    for (at, byte) in [(14, 0x40), (19, 15)] {
        let mut bad = good.clone();
        bad[at] = byte;
        assert_eq!(outer(&bad), Err(Reason::Malformed), "byte {at} {byte:#x}");
    }
}

#[test]
fn every_truncation_of_a_frame_is_refused_up_to_its_udp_header() {
    for (frame, udp) in [
        (fou4(5555, b"inner"), 34),
        (fou6(5555, &[], b"inner"), 54),
        (fou6(5555, &[Extension::Options(DESTINATION, 0), Extension::Fragment(0)], b"inner"), 70),
    ] {
        for length in 0..=frame.len() {
            let parsed = outer(&frame[..length]);
            match length {
                0..14 => assert_eq!(parsed, Err(Reason::NotFou), "{length}"),
                _ if length < udp + 8 => assert_eq!(parsed, Err(Reason::Malformed), "{length}"),
                _ => assert!(parsed.is_ok(), "{length}: {parsed:?}"),
            }
        }
    }
}

#[test]
fn every_truncation_of_an_inner_packet_has_a_flow() {
    for inner in inners() {
        let frame = fou4(5555, &inner);
        for length in 42..=frame.len() {
            frames::frame(&frame[..length]);
            let (key, ..) = inner_flow(&frame[..length], 42);
            if length - 42 < 20 {
                assert_eq!((key.source, key.destination, key.protocol), ([0; 16], [0; 16], 0), "{length}");
            }
        }
    }
}

/// Addresses, ports, protocol and kind of the flow of an inner packet.
fn flow_of(inner: &[u8]) -> ([u8; 16], [u8; 16], u16, u16, u8, FlowPacket, Fragment) {
    let (key, _, packet, fragment) = inner_flow(inner, 0);
    let (source, destination) =
        (u16::from_be_bytes(key.source_port), u16::from_be_bytes(key.destination_port));
    (key.source, key.destination, source, destination, key.protocol, packet, fragment)
}

fn v4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    ipv4(CLIENT4, OUTSIDE4, protocol, 0, &[], payload)
}

fn v6(protocol: u8, payload: &[u8]) -> Vec<u8> {
    ipv6(CLIENT6, OUTSIDE6, protocol, payload)
}

const FROM4: [u8; 16] = v4_mapped(CLIENT4);
const TO4: [u8; 16] = v4_mapped(OUTSIDE4);

#[test]
fn tcp_flags_say_how_a_connection_lives() {
    for flags in 0..=255u8 {
        let expected = match flags {
            _ if flags & 0x12 == 0x02 => FlowPacket::Opening,
            _ if flags & 0x05 != 0 => FlowPacket::Closing,
            _ => FlowPacket::Established,
        };
        let segment = tcp(40000, 443, flags);
        assert_eq!(
            flow_of(&v4(TCP, &segment)),
            (FROM4, TO4, 40000, 443, TCP, expected, Fragment::Whole),
            "{flags:#x}"
        );
        let expected6 = (CLIENT6, OUTSIDE6, 40000, 443, TCP, expected, Fragment::Whole);
        assert_eq!(flow_of(&v6(TCP, &segment)), expected6, "{flags:#x}");
    }
}

#[test]
fn flows_go_by_ports_identifiers_or_addresses_alone() {
    let stateless = (FlowPacket::Stateless, Fragment::Whole);
    for (protocol, payload, source, destination) in [
        (UDP, udp(40001, 53, b"question"), 40001, 53),
        (ICMP, icmp(8, &[0x77, 0x88, 0, 1]), 0x7788, 0),
        (ICMP, icmp(0, &[0x77, 0x88, 0, 1]), 0x7788, 0),
        (ICMP, icmp(13, &[0x77, 0x88, 0, 1]), 0, 0),
        (47, vec![1; 16], 0, 0),
        (132, tcp(1, 2, 2), 0, 0),
        (50, vec![1; 16], 0, 0),
    ] {
        let expected = (FROM4, TO4, source, destination, protocol, stateless.0, stateless.1);
        assert_eq!(flow_of(&v4(protocol, &payload)), expected);
        let optioned = ipv4(CLIENT4, OUTSIDE4, protocol, 0, &[1; 40], &payload);
        assert_eq!(flow_of(&optioned), expected);
    }
    let echo = v6(ICMPV6, &icmp(128, &[0x77, 0x88, 0, 1]));
    assert_eq!(flow_of(&echo), (CLIENT6, OUTSIDE6, 0x7788, 0, ICMPV6, stateless.0, stateless.1));
    for headers in [
        vec![Extension::Options(DESTINATION, 0)],
        vec![
            Extension::Options(HOP_BY_HOP, 1),
            Extension::Options(ROUTING, 2),
            Extension::Options(DESTINATION, 0),
        ],
        vec![Extension::Fragment(0), Extension::Options(DESTINATION, 0)],
    ] {
        let (next, payload) = extensions(&headers, UDP, &udp(40001, 53, b"question"));
        assert_eq!(
            flow_of(&v6(next, &payload)),
            (CLIENT6, OUTSIDE6, 40001, 53, UDP, stateless.0, stateless.1)
        );
    }
}

#[test]
fn icmp_error_belongs_to_the_flow_that_it_quotes() {
    let error4 = |kind, quoted: &[u8]| v4(ICMP, &icmp(kind, &[&[0; 4], quoted].concat()));
    let error6 = |kind, quoted: &[u8]| v6(ICMPV6, &icmp(kind, &[&[0; 4], quoted].concat()));
    for kind in [3, 4, 5, 11, 12] {
        for options in [&[][..], &[1; 12]] {
            let quoted = ipv4(OUTSIDE4, CLIENT4, TCP, 0, options, &tcp(443, 40000, 0x02)[..8]);
            let expected = (FROM4, TO4, 40000, 443, TCP, FlowPacket::Established, Fragment::Whole);
            assert_eq!(flow_of(&error4(kind, &quoted)), expected, "{kind}");
        }
        let quoted = ipv4(OUTSIDE4, CLIENT4, UDP, 0, &[], &udp(53, 40001, &[]));
        let expected = (FROM4, TO4, 40001, 53, UDP, FlowPacket::Stateless, Fragment::Whole);
        assert_eq!(flow_of(&error4(kind, &quoted)), expected, "{kind}");
        let echo = ipv4(OUTSIDE4, CLIENT4, ICMP, 0, &[], &icmp(0, &[0x77, 0x88, 0, 1]));
        let expected = (FROM4, TO4, 0x7788, 0, ICMP, FlowPacket::Stateless, Fragment::Whole);
        assert_eq!(flow_of(&error4(kind, &echo)), expected, "{kind}");
        let later = ipv4(OUTSIDE4, CLIENT4, TCP, 100, &[], &[0xff; 8]);
        let expected = (FROM4, TO4, 0, 0, TCP, FlowPacket::Established, Fragment::Whole);
        assert_eq!(flow_of(&error4(kind, &later)), expected, "{kind}");
    }
    for kind in [1, 2, 3, 4] {
        let quoted = ipv6(OUTSIDE6, CLIENT6, TCP, &tcp(443, 40000, 0x10));
        let expected = (CLIENT6, OUTSIDE6, 40000, 443, TCP, FlowPacket::Established, Fragment::Whole);
        assert_eq!(flow_of(&error6(kind, &quoted)), expected, "{kind}");
    }
    // Something that is no packet is quoted: the message goes by its own addresses.
    for garbage in [[0x00; 28], [0x30; 28], [0xff; 28]] {
        let expected = (FROM4, TO4, 0, 0, ICMP, FlowPacket::Stateless, Fragment::Whole);
        assert_eq!(flow_of(&error4(3, &garbage)), expected);
    }
    // A request's reply is not an error whatever it carries.
    let request = ipv4(OUTSIDE4, CLIENT4, TCP, 0, &[], &tcp(443, 40000, 0x10));
    let expected = (FROM4, TO4, 0, 0, ICMP, FlowPacket::Stateless, Fragment::Whole);
    assert_eq!(flow_of(&error4(18, &request)), expected);
}

/// What a later fragment's flow is once it follows the first.
fn follows(first: &[u8], later: &[u8]) {
    let (first_key, first_fragment, _, fragment) = inner_flow(first, 0);
    assert_eq!(fragment, Fragment::First);
    let (mut key, later_fragment, packet, fragment) = inner_flow(later, 0);
    assert_eq!((packet, fragment), (FlowPacket::Stateless, Fragment::Later));
    assert_eq!(first_fragment, later_fragment);
    assert_eq!((key.source_port, key.destination_port), ([0; 2], [0; 2]));
    let ports =
        FragmentPorts { source_port: first_key.source_port, destination_port: first_key.destination_port };
    follow_first(&mut key, &ports);
    assert_eq!(key, first_key);
    assert_eq!((u16::from_be_bytes(key.source_port), u16::from_be_bytes(key.destination_port)), (40001, 53));
}

#[test]
fn later_fragments_follow_the_first() {
    let datagram = udp(40001, 53, &[0; 32]);
    let v4 = |bits, payload: &[u8]| ipv4(CLIENT4, OUTSIDE4, UDP, bits, &[], payload);
    follows(&v4(MORE, &datagram), &v4(3, &[0xff; 16]));
    follows(&v4(MORE, &datagram), &v4(MORE | 3, &[0xff; 16]));
    let v6 = |headers: &[Extension], payload: &[u8]| {
        let (next, payload) = extensions(headers, UDP, payload);
        v6(next, &payload)
    };
    follows(&v6(&[Extension::Fragment(1)], &datagram), &v6(&[Extension::Fragment(24)], &[0xff; 16]));
    let options = Extension::Options(DESTINATION, 0);
    follows(
        &v6(&[options, Extension::Fragment(1)], &datagram),
        &v6(&[options, Extension::Fragment(25)], &[0xff; 16]),
    );
}

#[test]
fn fragments_of_other_datagrams_do_not_match() {
    let piece = |id: u8, source: [u8; 4], protocol| {
        let mut packet = ipv4(source, OUTSIDE4, protocol, MORE, &[], &udp(40001, 53, &[0; 8]));
        packet[5] = id;
        inner_flow(&packet, 0).1
    };
    let one = piece(1, CLIENT4, UDP);
    assert_eq!(one, piece(1, CLIENT4, UDP));
    for other in [piece(2, CLIENT4, UDP), piece(1, [10, 0, 0, 2], UDP), piece(1, CLIENT4, TCP)] {
        assert_ne!(one, other);
    }
}

proptest! {
    #[test]
    fn any_addresses_ports_options_and_headers_are_read_back(
        client: [u8; 4], service: [u8; 4], client6: [u8; 16], service6: [u8; 16],
        port: u16, inner_ports: (u16, u16), flags: u8, words in 0..10usize, units in prop::collection::vec(0..4u8, 0..4)
    ) {
        let inner = v4(TCP, &tcp(inner_ports.0, inner_ports.1, flags));
        let frame4 = ethernet(0x0800, &ipv4(client, service, UDP, MORE, &vec![1; 4 * words], &udp(port, 5555, &inner)));
        let headers: Vec<_> = units.iter().map(|units| Extension::Options(DESTINATION, *units)).collect();
        let (next, payload) = extensions(&headers, UDP, &udp(port, 5555, &inner));
        let frame6 = ethernet(0x86dd, &ipv6(client6, service6, next, &payload));
        let Ok(FouPacket::V4(outer4)) = outer(&frame4) else { panic!("{frame4:?}") };
        let Ok(FouPacket::V6(outer6)) = outer(&frame6) else { panic!("{frame6:?}") };
        prop_assert_eq!((outer4.source, outer4.destination, outer4.source_port), (client, service, port.to_be_bytes()));
        prop_assert_eq!((outer6.source, outer6.destination, outer6.source_port), (client6, service6, port.to_be_bytes()));
        for (frame, offset) in [(&frame4, outer4.inner()), (&frame6, outer6.inner())] {
            let (key, ..) = inner_flow(frame, offset);
            prop_assert_eq!((key.source, key.destination, key.protocol), (FROM4, TO4, TCP));
            prop_assert_eq!(key.source_port, inner_ports.0.to_be_bytes());
            prop_assert_eq!(key.destination_port, inner_ports.1.to_be_bytes());
        }
    }
}
