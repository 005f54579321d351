//! What the guard has no business with passes byte for byte, and leaves no trace but one counter.

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{abi::mode, counters::Reason};
use coil_guard_tests::{
    fou::{FOU_PORT, tcp},
    program::{Scene, monotonic, pod_config},
};

use crate::support::{each_family, ensure_untouched};

/// Mode drain, the flow's backend leaving: whatever reaches the decision here moves or is drained.
fn leaving(scene: &mut Scene, family: coil_guard_tests::cilium::IpFamily, mode: u8) -> Result<()> {
    scene.begin(family, mode)?;
    scene.entry(FOU_PORT, 1, coil_guard_tests::program::REV_NAT)?;
    scene.leaving(1, 0)
}

#[test]
fn frames_that_are_not_fou_pass() -> Result<()> {
    each_family(|scene, family| {
        for mode in [mode::RESET, mode::DRAIN] {
            leaving(scene, family, mode)?;
            let good = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
            let v6 = good[14] >> 4 == 6;
            let udp = if v6 { 62 } else { 34 };
            let with = |at: usize, bytes: &[u8]| {
                let mut frame = good.clone();
                frame[at..at + bytes.len()].copy_from_slice(bytes);
                frame
            };
            let vlan = [&good[..12], &[0x81, 0, 0, 5], &good[12..]].concat();
            let next = if v6 { 20 } else { 23 };
            let mut cases = vec![
                ("ARP", with(12, &[0x08, 0x06]), Reason::NotFou),
                ("VLAN", vlan, Reason::NotFou),
                ("TCP", with(next, &[6]), Reason::NotFou),
                ("another destination port", with(udp + 2, &[0x15, 0xb4]), Reason::NotFou),
                ("version 5", with(14, &[0x55]), Reason::Malformed),
                ("cut in the UDP header", good[..udp + 7].to_vec(), Reason::Malformed),
                ("bare Ethernet header and a byte", with(12, &[0x88, 0xb5])[..15].to_vec(), Reason::NotFou),
            ];
            if v6 {
                cases.extend([
                    ("a later fragment", with(20, &[44]), Reason::OuterFragment),
                    ("five extension headers", extension_headers(&good, 5), Reason::ExtensionHeaders),
                    ("a header that has no length", with(20, &[59]), Reason::NotFou),
                ]);
                // The options header, read as a fragment header, must have an offset.
                if let Some((_, frame, _)) = cases.iter_mut().find(|(what, ..)| *what == "a later fragment") {
                    frame[56..58].copy_from_slice(&[0, 8]);
                }
            } else {
                cases.extend([
                    ("a later fragment", with(20, &[0x20, 1]), Reason::OuterFragment),
                    ("header length 4", with(14, &[0x44]), Reason::Malformed),
                    ("no room for UDP", with(16, &[0, 27]), Reason::Malformed),
                ]);
            }
            for (what, frame, reason) in cases {
                let run = scene.run(&frame).with_context(|| what.to_owned())?;
                ensure!(run.reason == reason, "{what}: {:?}, expected {reason:?}", run.reason);
                ensure_untouched(&frame, &run).with_context(|| what.to_owned())?;
            }
        }
        Ok(())
    })
}

/// `count` Destination Options headers between the IPv6 header and the one that Coil's devices send.
fn extension_headers(frame: &[u8], count: usize) -> Vec<u8> {
    let mut more = frame[..54].to_vec();
    for _ in 1..count {
        more.extend([60, 0, 1, 4, 0, 0, 0, 0]);
    }
    more.extend(&frame[54..]);
    more
}

#[test]
fn extension_headers_within_the_bound_are_walked() -> Result<()> {
    each_family(|scene, family| {
        if family == coil_guard_tests::cilium::IpFamily::V4 {
            return Ok(());
        }
        scene.family = family;
        let good = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
        let none = scene.frame_with(FOU_PORT, &[0x45; 30], coil_guard_tests::program::Checksum::None, false);
        for frame in [none, extension_headers(&good, 1), extension_headers(&good, 4)] {
            leaving(scene, family, mode::RESET)?;
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::Moved, "{:?}", run.reason);
        }
        Ok(())
    })
}

/// Options in the outer IPv4 header shift everything behind it.
#[test]
fn outer_ipv4_options_are_skipped() -> Result<()> {
    each_family(|scene, family| {
        if family == coil_guard_tests::cilium::IpFamily::V6 {
            return Ok(());
        }
        for words in 1..=10u8 {
            leaving(scene, family, mode::RESET)?;
            let good = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
            let mut frame = good[..34].to_vec();
            frame[14] = 0x45 + words;
            frame.extend(vec![1; usize::from(words) * 4]);
            frame.extend(&good[34..]);
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::Moved, "{words} words of options: {:?}", run.reason);
            ensure!(run.output == frame, "the packet changed");
        }
        Ok(())
    })
}

#[test]
fn flows_of_others_pass() -> Result<()> {
    each_family(|scene, family| {
        for mode in [mode::AUDIT, mode::RESET, mode::DRAIN] {
            leaving(scene, family, mode)?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
            let destination = if frame[14] >> 4 == 6 { 38..54 } else { 30..34 };
            let source = if frame[14] >> 4 == 6 { 22..38 } else { 26..30 };

            let mut other = frame.clone();
            other[destination.end - 1] ^= 1;
            let run = scene.run(&other)?;
            ensure!(run.reason == Reason::NotGuarded, "another service: {:?}", run.reason);
            ensure_untouched(&other, &run)?;

            let mut forged = frame.clone();
            forged[source.end - 1] ^= 1;
            let run = scene.run(&forged)?;
            ensure!(run.reason == Reason::ForeignSource, "a forged source: {:?}", run.reason);
            ensure_untouched(&forged, &run)?;
            ensure!(run.events.is_empty() && run.egress.packets == 0, "a forged source: {run:?}");
        }
        Ok(())
    })
}

#[test]
fn a_service_counts_as_guarded_until_it_expires() -> Result<()> {
    each_family(|scene, family| {
        leaving(scene, family, mode::RESET)?;
        let frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
        scene.guarded_until(mode::RESET, 0, monotonic() - 20_000_000, 1)?;
        let run = scene.run(&frame)?;
        ensure!(run.reason == Reason::NotGuarded, "{:?}", run.reason);
        ensure_untouched(&frame, &run)?;
        scene.guarded_until(mode::RESET, 0, monotonic() + 60_000_000_000, 1)?;
        let run = scene.run(&frame)?;
        ensure!(run.reason == Reason::Moved, "{:?}", run.reason);
        Ok(())
    })
}

#[test]
fn an_unknown_mode_is_off() -> Result<()> {
    each_family(|scene, family| {
        for mode in [0, 5, 0xff] {
            leaving(scene, family, mode)?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::NotGuarded, "mode {mode}: {:?}", run.reason);
            ensure_untouched(&frame, &run)?;
        }
        Ok(())
    })
}

#[test]
fn a_service_that_cilium_does_not_know_is_left_alone() -> Result<()> {
    each_family(|scene, family| {
        for mode in [mode::AUDIT, mode::RESET, mode::DRAIN] {
            leaving(scene, family, mode)?;
            scene.remove_service()?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::UnknownService, "{:?}", run.reason);
            ensure_untouched(&frame, &run)?;
        }
        Ok(())
    })
}

/// A pod of one family owns no address of the other.
#[test]
fn a_pod_without_an_address_of_the_family_owns_no_packet_of_it() -> Result<()> {
    use coil_guard_common::abi::{POD_HAS_IPV4, POD_HAS_IPV6};
    use coil_guard_tests::{
        cilium::CiliumVersion,
        net::{Paths, lab_test},
        program::Sizes,
    };
    lab_test(|| {
        for (family, flags) in crate::support::FAMILIES.into_iter().zip([POD_HAS_IPV6, POD_HAS_IPV4]) {
            let config = coil_guard_common::abi::PodConfig { flags, ..pod_config() };
            let directory = Paths.cilium_maps().join(flags.to_string());
            let mut scene = Scene::load_for(&directory, CiliumVersion::V1_17, Sizes::default(), &config)?;
            leaving(&mut scene, family, mode::RESET)?;
            let frame = scene.frame(FOU_PORT, &scene.tcp(1, tcp::SYN));
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::ForeignSource, "{family:?}: {:?}", run.reason);
            ensure_untouched(&frame, &run)?;
        }
        Ok(())
    })
}
