//! The programs for symmetric replies of mode `rewrite`, packet by packet.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use coil_guard_common::{
    abi::{ANSWER_VALID_FOR, Answer, AnswerKey, RETURN_PORT_FIRST, mode, reply_program},
    counters::{Reason, ReplyCount},
};
use coil_guard_tests::{
    cilium::{IpFamily, hex},
    fou::{FOU_PORT, InnerPacket, checksum, tcp},
    net::lab_test,
    program::{
        CLIENT_GENERATION, Checksum, REV_NAT, Replies, Rng, address_of, bytes, frame_between, monotonic,
        replies::{answer_key, client, egress_pod, service},
        udp_offset,
    },
};

use crate::{
    hostile::mutate,
    support::{self, FAMILIES, OTHER_PORT},
};

/// A port at which a client can have replies.
const PORT: u16 = 65400;
const SECOND: u64 = 1_000_000_000;
/// The kernel is asked for its clock as of the last tick.
const TICK: u64 = 20_000_000;
const ALL: [&str; 3] = [reply_program::LEARN, reply_program::ANSWER, reply_program::RETURN];

fn each_family(test: impl Fn(&mut Replies, IpFamily) -> Result<()> + Send + Sync) -> Result<()> {
    lab_test(|| {
        for family in FAMILIES {
            let mut replies = Replies::load()?;
            test(&mut replies, family).with_context(|| format!("{family:?}"))?;
        }
        Ok(())
    })
}

fn inner(family: IpFamily) -> Vec<u8> {
    bytes(&InnerPacket::udp((client(family), 40_000), (address_of(family, 77), 53)))
}

fn frame(source: (IpAddr, u16), destination: (IpAddr, u16), family: IpFamily) -> Vec<u8> {
    frame_between(source, destination, &inner(family), Checksum::None, true)
}

fn request(family: IpFamily, port: u16) -> Vec<u8> {
    frame((client(family), port), (egress_pod(family), FOU_PORT), family)
}

fn reply(family: IpFamily) -> Vec<u8> {
    frame((egress_pod(family), FOU_PORT), (client(family), FOU_PORT), family)
}

fn ensure_same(replies: &Replies, program: &'static str, frame: &[u8], what: &str) -> Result<()> {
    let output = replies.run(program, frame)?;
    ensure!(output == frame, "{what}: {program} changed\n{}\n{}", hex(frame), hex(&output));
    Ok(())
}

/// `before` and `after` differ by the destination port, now `port`, and a checksum that is right for it.
fn ensure_redirected(
    before: &[u8],
    after: &[u8],
    state: Checksum,
    family: IpFamily,
    port: u16,
) -> Result<()> {
    let udp = udp_offset(before, &inner(family));
    let mut expected = before.to_vec();
    expected[udp + 2..udp + 4].copy_from_slice(&port.to_be_bytes());
    if state == Checksum::Finished {
        expected[udp + 6..udp + 8].fill(0);
        let (source, destination) = addresses(before);
        let sum = checksum::transport(source, destination, 17, &expected[udp..]);
        let sum = if sum == 0 { 0xffff } else { sum };
        expected[udp + 6..udp + 8].copy_from_slice(&sum.to_be_bytes());
    }
    ensure!(after == expected, "{state:?}:\n{}\n{}", hex(&expected), hex(after));
    Ok(())
}

fn addresses(frame: &[u8]) -> (IpAddr, IpAddr) {
    let v6 = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).expect("16 bytes"));
    let v4 = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).expect("4 bytes"));
    if frame[14] >> 4 == 6 { (v6(22), v6(38)) } else { (v4(26), v4(30)) }
}

#[test]
fn the_verifier_takes_them_at_little_cost() -> Result<()> {
    lab_test(|| {
        let replies = Replies::load()?;
        println!("{:?}", replies.verified);
        for (name, instructions) in &replies.verified {
            ensure!((1..4000).contains(instructions), "{name}: {instructions} instructions");
        }
        Ok(())
    })
}

#[test]
fn an_egress_pod_learns_the_port_of_each_client_s_last_packet() -> Result<()> {
    each_family(|replies, family| {
        let learnt = |replies: &Replies| {
            Ok::<_, anyhow::Error>(replies.learnt(family)?.map(|answer| u16::from_be_bytes(answer.port)))
        };
        for (port, expected) in [
            (FOU_PORT, None),
            (PORT, Some(PORT)),
            (PORT, Some(PORT)),
            (65316, Some(65316)),
            (u16::MAX, Some(u16::MAX)),
            // A port at which the client can have no replies.
            (65315, None),
            (65096, None),
            (PORT, Some(PORT)),
            (FOU_PORT, None),
            (PORT, Some(PORT)),
            // Another mode, or fouSourcePortAuto.
            (61001, None),
        ] {
            ensure_same(replies, reply_program::LEARN, &request(family, port), "a packet of a client")?;
            let found = learnt(replies)?;
            ensure!(found == expected, "after a packet from port {port}: {found:?}, expected {expected:?}");
        }
        let counts = (replies.count(ReplyCount::Learnt)?, replies.count(ReplyCount::Forgotten)?);
        ensure!(counts == (5, 3), "{counts:?}");
        Ok(())
    })
}

#[test]
fn the_time_of_the_last_packet_is_known_to_the_second() -> Result<()> {
    each_family(|replies, family| {
        for (age, written) in [(SECOND / 2, false), (2 * SECOND, true)] {
            let before = monotonic() - age;
            replies.teach(family, PORT, before)?;
            ensure_same(replies, reply_program::LEARN, &request(family, PORT), "a packet of a client")?;
            let seen = replies.learnt(family)?.context("forgotten")?.last_seen;
            ensure!((seen != before) == written, "{age} ns old: {before} -> {seen}");
        }
        ensure!(replies.count(ReplyCount::Learnt)? == 0, "the port is the same");
        Ok(())
    })
}

#[test]
fn nothing_is_learnt_from_packets_to_others_or_to_other_ports() -> Result<()> {
    each_family(|replies, family| {
        replies.teach(family, PORT, monotonic())?;
        let cases = [
            ("another pod", frame((client(family), 65401), (address_of(family, 9), FOU_PORT), family)),
            ("another port", frame((client(family), 65401), (egress_pod(family), 5556), family)),
            ("not UDP", {
                let mut frame = request(family, 65401);
                frame[if family == IpFamily::V6 { 54 } else { 23 }] = 6;
                frame
            }),
            ("cut off", request(family, 65401)[..if family == IpFamily::V6 { 60 } else { 40 }].to_vec()),
        ];
        for (what, frame) in cases {
            ensure_same(replies, reply_program::LEARN, &frame, what)?;
            let port = replies.learnt(family)?.map(|answer| u16::from_be_bytes(answer.port));
            ensure!(port == Some(PORT), "{what}: {port:?}");
        }
        Ok(())
    })
}

#[test]
fn replies_go_to_the_learnt_port_with_the_right_checksum() -> Result<()> {
    each_family(|replies, family| {
        replies.teach(family, PORT, monotonic())?;
        for state in Checksum::ALL {
            for options in [false, true] {
                let (from, to) = ((egress_pod(family), FOU_PORT), (client(family), FOU_PORT));
                let before = frame_between(from, to, &inner(family), state, options);
                let after = replies.run(reply_program::ANSWER, &before)?;
                ensure_redirected(&before, &after, state, family, PORT)?;
            }
        }
        ensure!(replies.count(ReplyCount::Answered)? == 6, "not all were counted");
        Ok(())
    })
}

#[test]
fn replies_go_to_the_fou_port_where_nothing_valid_is_known() -> Result<()> {
    each_family(|replies, family| {
        ensure_same(replies, reply_program::ANSWER, &reply(family), "nothing learnt")?;
        replies.teach(family, PORT, monotonic() - ANSWER_VALID_FOR - TICK)?;
        ensure_same(replies, reply_program::ANSWER, &reply(family), "not seen for ten minutes")?;
        for port in [FOU_PORT, 65096, 65315, 0] {
            replies.teach(family, port, monotonic())?;
            ensure_same(replies, reply_program::ANSWER, &reply(family), "a port that announces nothing")?;
        }
        Ok(())
    })
}

#[test]
fn other_packets_of_an_egress_pod_are_left_alone() -> Result<()> {
    each_family(|replies, family| {
        replies.teach(family, PORT, monotonic())?;
        let (own, to) = (egress_pod(family), client(family));
        for (what, frame) in [
            ("fouSourcePortAuto", frame((own, 40_000), (to, FOU_PORT), family)),
            ("another destination port", frame((own, FOU_PORT), (to, 53), family)),
            ("another client", frame((own, FOU_PORT), (address_of(family, 78), FOU_PORT), family)),
            ("a forged source", frame((address_of(family, 2), FOU_PORT), (to, FOU_PORT), family)),
        ] {
            ensure_same(replies, reply_program::ANSWER, &frame, what)?;
        }
        // What another egress pod of the node has learnt of the same client.
        let key = AnswerKey { egress_pod: answer_key(family).client, ..answer_key(family) };
        replies.teach(family, FOU_PORT, monotonic())?;
        replies.teach_key(key, Answer { last_seen: monotonic(), port: PORT.to_be_bytes(), pad: [0; 6] })?;
        ensure_same(replies, reply_program::ANSWER, &reply(family), "learnt by another pod")?;
        ensure!(replies.count(ReplyCount::Answered)? == 0, "counted as answered");
        Ok(())
    })
}

#[test]
fn a_client_gets_replies_at_its_fou_port() -> Result<()> {
    each_family(|replies, family| {
        replies.give(family, PORT, CLIENT_GENERATION)?;
        replies.mark(family)?;
        let to = (client(family), PORT);
        for source in [service(family), egress_pod(family)] {
            for state in Checksum::ALL {
                let before =
                    frame_between((source, FOU_PORT), to, &inner(family), state, state == Checksum::None);
                let after = replies.run(reply_program::RETURN, &before)?;
                ensure_redirected(&before, &after, state, family, FOU_PORT)
                    .with_context(|| format!("from {source}"))?;
            }
        }
        ensure!(replies.count(ReplyCount::Returned)? == 6, "not all were counted");
        ensure!(replies.count(ReplyCount::NotReturned)? == 0, "counted as left alone");
        Ok(())
    })
}

/// A pod may have sockets of its own at these ports.
#[test]
fn what_is_no_reply_keeps_its_port() -> Result<()> {
    each_family(|replies, family| {
        replies.give(family, PORT, CLIENT_GENERATION)?;
        replies.give(family, PORT + 1, CLIENT_GENERATION + 1)?;
        let (own, from) = (client(family), service(family));
        for (what, counted, frame) in [
            ("a port that was not given", true, frame((from, FOU_PORT), (own, PORT + 2), family)),
            ("given to an earlier pod", true, frame((from, FOU_PORT), (own, PORT + 1), family)),
            ("no backend", true, frame((egress_pod(family), FOU_PORT), (own, PORT), family)),
            ("from another port", false, frame((from, 53), (own, PORT), family)),
            ("to a lower port", false, frame((from, FOU_PORT), (own, 65315), family)),
            ("to the FoU port", false, frame((from, FOU_PORT), (own, FOU_PORT), family)),
            ("to another pod", false, frame((from, FOU_PORT), (address_of(family, 79), PORT), family)),
        ] {
            let before = replies.count(ReplyCount::NotReturned)?;
            ensure_same(replies, reply_program::RETURN, &frame, what)?;
            let counted_now = replies.count(ReplyCount::NotReturned)? - before;
            ensure!(counted_now == u64::from(counted), "{what}: counted {counted_now} times");
        }
        ensure!(replies.count(ReplyCount::Returned)? == 0, "counted as returned");
        Ok(())
    })
}

/// Which half of the ports a flow is given says whether its client can have replies there.
#[test]
fn a_client_whose_replies_are_turned_back_is_given_a_port_that_says_so() -> Result<()> {
    support::each_family(|scene, family| {
        let own = CLIENT_GENERATION;
        for (what, returning, port, symmetric) in [
            ("nothing is known of it", None, FOU_PORT, false),
            ("it is", Some(own), FOU_PORT, true),
            ("an earlier pod was", Some(own + 1), FOU_PORT, false),
            ("fouSourcePortAuto", Some(own), OTHER_PORT, false),
        ] {
            scene.begin(family, mode::REWRITE)?;
            scene.entry(port, 1, REV_NAT)?;
            scene.leaving(1, 0)?;
            if let Some(generation) = returning {
                scene.returning(generation)?;
            }
            let inner = bytes(&scene.tcp(1, tcp::SYN));
            let frame = scene.frame_with(port, &inner, Checksum::None, true);
            let run = scene.run(&frame)?;
            ensure!(run.reason == Reason::NewPort, "{what}: {:?}", run.reason);
            let udp = udp_offset(&frame, &inner);
            let given = u16::from_be_bytes([run.output[udp], run.output[udp + 1]]);
            ensure!((given >= RETURN_PORT_FIRST) == symmetric, "{what}: port {given}");
            let expected = symmetric.then(|| (scene.cluster_ip(), own));
            ensure!(scene.given(given)? == expected, "{what}: {:?}", scene.given(given)?);
        }
        Ok(())
    })
}

/// Whatever comes in, nothing changes but the destination port and the checksum of a packet from FoU port to one that was
/// given, or from FoU port to FoU port.
#[test]
fn mutated_packets_never_change_elsewhere() -> Result<()> {
    each_family(|replies, family| {
        replies.give(family, PORT, CLIENT_GENERATION)?;
        replies.mark(family)?;
        replies.teach(family, PORT, monotonic())?;
        let seeds = [
            request(family, PORT),
            reply(family),
            frame((service(family), FOU_PORT), (client(family), PORT), family),
        ];
        let mut rng = Rng::new(0x5eed);
        for round in 0..20_000 {
            let seed = &seeds[round % seeds.len()];
            let mut frame = seed.clone();
            mutate(&mut frame, &mut rng);
            for program in ALL {
                let output = replies.run(program, &frame)?;
                ensure!(output.len() == frame.len(), "{program} changed the length of {}", hex(&frame));
                let changed: Vec<_> = (0..frame.len()).filter(|at| frame[*at] != output[*at]).collect();
                let Some(first) = changed.first() else { continue };
                ensure!(program != reply_program::LEARN, "{program} changed {}", hex(&frame));
                // Port, length, checksum: all within the six bytes that begin with the port.
                let last = changed.last().unwrap_or(first);
                ensure!(last - first < 6, "{program} changed bytes {changed:?} of {}", hex(&frame));
            }
        }
        Ok(())
    })
}
