//! The lab can be put into the states that an operator meets: other maps, missing maps, pods that come and go.

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::{
        AttachKind, BackendState, CiliumVersion, Endpoint, Expect, IpFamily, MapKind, MapOptions, MapShape,
        RawMap,
    },
    fou::{FOU_PORT, Fragment, FrameSender, Inner, InnerPacket, Outer, tcp},
    lab::{Lab, command, eventually},
    net::{Paths, PodRole, attachments, device::set_tx_checksum_offload, lab_test},
};

const FAMILIES: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

#[test]
fn maps_made_anew_under_traffic_lose_no_packet() -> Result<()> {
    for attach in [AttachKind::Tcx, AttachKind::Clsact] {
        lab_test(move || {
            let mut lab = Lab::builder().attach(attach).start()?;
            let stream = lab.stream(0, lab.spec(0, IpFamily::V4))?;
            stream.wait_arrived(100, lab.patience())?;
            let before = lab.maps.conntrack(IpFamily::V4)?.id()?;
            lab.recreate_maps(MapOptions { conntrack_entries: 8192, ..lab.maps.options().clone() })?;
            ensure!(before != lab.maps.conntrack(IpFamily::V4)?.id()?, "the map has the same id");
            stream.wait_arrived(stream.sent() + 500, lab.patience())?;
            stream.finish(true)?.ensure_exactly_once()?;
            ensure!(lab.service_entry(0, IpFamily::V4, FOU_PORT)?.is_some(), "the new map has no entry");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn agents_without_ipv6_or_affinity_have_fewer_maps() -> Result<()> {
    lab_test(|| {
        let version = CiliumVersion::V1_16;
        let options =
            MapOptions { families: vec![IpFamily::V4], affinity: false, ..MapOptions::new(version) };
        let lab = Lab::builder().version(version).maps(options).start()?;
        lab.stream(0, lab.spec(0, IpFamily::V4).count(50))?.finish(false)?.ensure_exactly_once()?;
        let pins: BTreeSet<_> = fs::read_dir(Paths.cilium_maps())?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        let expected = [
            "cilium_ct_any4_global",
            "cilium_lb4_backends_v3",
            "cilium_lb4_reverse_nat",
            "cilium_lb4_services_v2",
        ];
        ensure!(pins == expected.map(str::to_owned).into(), "pinned are {pins:?}");
        Ok(())
    })
}

#[test]
fn a_pin_can_be_taken_by_a_map_of_another_layout_while_the_model_goes_on() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().start()?;
        let name = IpFamily::V4.names().backends;
        let shape = MapShape { kind: MapKind::Hash, key_size: 4, value_size: 8, max_entries: 16, flags: 1 };
        lab.maps.pin_imposter(name, shape)?;
        lab.stream(0, lab.spec(0, IpFamily::V4).count(50))?.finish(false)?.ensure_exactly_once()?;
        lab.maps.unpin(name)?;
        ensure!(!lab.maps.path(name).exists(), "{name} is still pinned");
        lab.maps.restore_pin(name)?;
        ensure!(lab.maps.path(name).exists(), "{name} is not pinned");
        Ok(())
    })
}

#[test]
fn taps_see_what_left_the_pod_byte_for_byte() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().taps().start()?;
        let client = lab.client(0).clone();
        let sender = FrameSender::open(&client)?;
        let stream = lab.log.new_stream();
        for family in FAMILIES {
            let spec = lab.spec(0, family);
            let tag = coil_guard_tests::fou::Tag { stream, sequence: family as u64 };
            let packet = spec.outer.packet(&spec.inner[0].build(tag));
            sender.send_packet(&packet)?;
            let seen = lab.log.wait(lab.patience(), |state| {
                state.streams[&stream].records.iter().any(|record| {
                    let frame = record.frame.as_deref();
                    record.tag == Some(tag) && frame.is_some_and(|frame| frame[14..] == packet)
                })
            });
            ensure!(seen, "no such frame among {:?}", lab.log.stream(stream));
        }
        Ok(())
    })
}

#[test]
fn every_kind_of_inner_packet_arrives_as_it_was() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().backends(1).keep_frames().start()?;
        for family in FAMILIES {
            let spec = lab.spec(0, family);
            let (source, outside) = (spec.inner[0].source, spec.inner[0].destination);
            let syn = InnerPacket::tcp((source, 40_000), (outside, 443), tcp::SYN);
            let first = Fragment { identification: 7, offset: 0, more: true };
            let later = Fragment { identification: 7, offset: 60, more: false };
            let inner = vec![
                syn.clone(),
                InnerPacket::new(source, outside, Inner::Echo { identifier: 3, sequence: 1 }),
                InnerPacket::new(source, outside, Inner::TooBig { about: Box::new(syn.reversed()) }),
                InnerPacket::udp((source, 1), (outside, 2)).padded(480).fragment(first),
                InnerPacket::udp((source, 1), (outside, 2)).fragment(later),
                InnerPacket::new(source, outside, Inner::Other { protocol: 47 }).padded(1200),
            ];
            let report = lab.stream(0, spec.inner(inner.clone()).count(inner.len() as u64))?.finish(false)?;
            report.ensure_exactly_once()?;
            for (sequence, records) in report.arrivals() {
                let tag = coil_guard_tests::fou::Tag { stream: report.number, sequence };
                let sent = inner[sequence as usize].build(tag);
                let frame = records[0].frame.clone().context("frames are kept")?;
                ensure!(frame.ends_with(&sent), "packet {sequence} arrived as {frame:?}, sent {sent:?}");
            }
        }
        Ok(())
    })
}

#[test]
fn checksums_are_right_without_offload() -> Result<()> {
    use coil_guard_tests::fou::{ChecksumKind, Via};
    lab_test(|| {
        let lab = Lab::builder().backend_port(6666).start()?;
        lab.client(0).namespace.run(|| set_tx_checksum_offload("eth0", false))?;
        for device in ["lxc0", "egr0", "egr1", "egr2"] {
            set_tx_checksum_offload(device, false)?;
        }
        for family in FAMILIES {
            for via in [Via::Frames, Via::UdpSocket] {
                let spec = lab.spec(0, family).checksum(ChecksumKind::Correct).via(via).count(500);
                let report = lab.stream(0, spec)?.finish(false)?;
                report.ensure_exactly_once()?;
                report.ensure_answered_by(lab.service(family))?;
            }
        }
        let errors = lab.udp_errors()?;
        ensure!(errors.checksum == 0, "the kernel counted {errors:?}");
        Ok(())
    })
}

#[test]
fn a_wrong_checksum_is_counted_by_the_kernel_and_by_the_lab() -> Result<()> {
    use coil_guard_tests::fou::{ChecksumKind, ChecksumState};
    lab_test(|| {
        let lab = Lab::builder().start()?;
        for family in FAMILIES {
            let spec = lab.spec(0, family).checksum(ChecksumKind::Wrong).count(10);
            let report = lab.stream(0, spec)?.finish(false)?;
            let wrong =
                report.records.iter().filter(|record| record.checksum == ChecksumState::Wrong).count();
            ensure!(
                wrong == 10 && report.ensure_exactly_once().is_err(),
                "{wrong} of 10 were seen to be wrong"
            );
        }
        let errors = lab.udp_errors()?;
        ensure!(errors.checksum == 20, "the kernel counted {errors:?}");
        Ok(())
    })
}

#[test]
fn hostile_frames_pass_the_model_or_die_there() -> Result<()> {
    lab_test(|| {
        let lab = Lab::builder().start()?;
        let sender = FrameSender::open(lab.client(0))?;
        for family in FAMILIES {
            let spec = lab.spec(0, family);
            let packet = Outer::coil(spec.outer.source, spec.outer.destination).packet(&[0; 64]);
            for length in 1..packet.len() {
                sender.send_packet(&packet[..length])?;
            }
            for at in 0..60 {
                let mut changed = packet.clone();
                changed[at] ^= 0xff;
                sender.send_packet(&changed)?;
            }
            lab.stream(0, spec.count(50))?.finish(false)?.ensure_exactly_once()?;
        }
        Ok(())
    })
}

#[test]
fn endpoint_conditions_become_what_the_version_makes_of_them() -> Result<()> {
    lab_test(|| {
        let mut lab = Lab::builder().version(CiliumVersion::V1_17).families(&[IpFamily::V4]).start()?;
        lab.set_endpoint(0, Endpoint::TerminatingServing)?;
        ensure!(lab.backend_id(IpFamily::V4, 0)? == 1);
        lab.set_endpoint(0, Endpoint::TerminatingNotServing)?;
        ensure!(lab.backend_id(IpFamily::V4, 0).is_err(), "1.17 removes a backend that does not serve");
        lab.set_endpoint(0, Endpoint::Ready)?;
        ensure!(lab.backend_id(IpFamily::V4, 0)? == 4, "an id that was given away does not come back");
        Ok(())
    })?;
    lab_test(|| {
        let mut lab = Lab::builder().version(CiliumVersion::V1_19).families(&[IpFamily::V4]).start()?;
        lab.set_endpoint(0, Endpoint::NotReady)?;
        let state = lab.control.service(lab.service_id(IpFamily::V4)).backends[0].state;
        ensure!(state == BackendState::Maintenance, "1.19 keeps it, in maintenance, not {state:?}");
        let report = lab.stream(0, lab.spec(0, IpFamily::V4).count(20))?.finish(false)?;
        ensure!(report.arrived_at(0).is_empty(), "it got new flows: {report:?}");
        Ok(())
    })
}

#[test]
fn pods_come_and_go_and_an_unguarded_pod_has_nothing_attached() -> Result<()> {
    lab_test(|| {
        let mut lab = Lab::builder().backends(1).start()?;
        ensure!(lab.attachments(0)?.is_empty(), "attached: {:?}", lab.attachments(0)?);
        let host = attachments(&lab.client(0).host_device)?;
        ensure!(host.tcx_ingress.len() == 1 && host.tcx_egress.len() == 1, "on the host side: {host:?}");
        let client = lab.add_client_pod()?;
        let backend = lab.add_backend_pod()?;
        lab.publish_backend(backend)?;
        for family in FAMILIES {
            lab.stream(client, lab.spec(client, family).count(50))?.finish(false)?.ensure_exactly_once()?;
        }
        let file = lab.client(client).namespace.path().to_owned();
        lab.topology.remove_pod(PodRole::Client, client)?;
        ensure!(!file.exists(), "{} is still there", file.display());
        Ok(())
    })?;
    lab_test(|| {
        let lab = Lab::builder().attach(AttachKind::Clsact).start()?;
        let host = attachments(&lab.client(0).host_device)?;
        ensure!(
            host.ingress_filters.len() == 1 && host.egress_filters.len() == 1,
            "on the host side: {host:?}"
        );
        ensure!(host.qdiscs.len() == 1 && host.qdiscs[0].kind == "clsact", "on the host side: {host:?}");
        Ok(())
    })
}

#[test]
fn raw_maps_keep_the_conditions_of_an_update() -> Result<()> {
    lab_test(|| {
        let shape = MapShape { kind: MapKind::Hash, key_size: 4, value_size: 8, max_entries: 4, flags: 0 };
        let map = RawMap::create("conditions", shape)?;
        ensure!(!map.update_bytes(&[1; 4], &[2; 8], Expect::Present)?, "there was nothing to replace");
        ensure!(map.update_bytes(&[1; 4], &[2; 8], Expect::Absent)?, "there was nothing yet");
        ensure!(!map.update_bytes(&[1; 4], &[3; 8], Expect::Absent)?, "there was something already");
        ensure!(map.update_bytes(&[1; 4], &[3; 8], Expect::Present)?, "it was there");
        ensure!(map.dump()?.into_iter().eq([(vec![1; 4], vec![3; 8])]), "{:?}", map.dump()?);
        ensure!(map.delete_bytes(&[1; 4])? && !map.delete_bytes(&[1; 4])?, "deleted once");
        ensure!(map.lookup_bytes(&[1; 5]).is_err(), "a key of another size is refused");
        Ok(())
    })
}

#[test]
fn no_program_or_map_outlives_the_lab() -> Result<()> {
    let made = std::sync::Mutex::new((Vec::new(), Vec::new()));
    for attach in [AttachKind::Tcx, AttachKind::Clsact] {
        lab_test(|| {
            let lab = Lab::builder().attach(attach).start()?;
            let maps = lab.maps.names().map(|name| lab.maps.get(name)?.id()).collect::<Result<_>>()?;
            *made.lock().map_err(|_| anyhow::anyhow!("poisoned"))? = (lab.model.program_ids()?, maps);
            Ok(())
        })?;
        let (programs, maps) = made.lock().map_err(|_| anyhow::anyhow!("poisoned"))?.clone();
        eventually("empty kernel", Duration::from_secs(10), || {
            let programs: Vec<_> = aya::programs::loaded_programs()
                .filter_map(|info| info.ok().map(|info| info.id()))
                .filter(|id| programs.contains(id))
                .collect();
            let maps: Vec<_> = aya::maps::loaded_maps()
                .filter_map(|info| info.ok().map(|info| info.id()))
                .filter(|id| maps.contains(id))
                .collect();
            Ok(if programs.is_empty() && maps.is_empty() { Ok(()) } else { Err((programs, maps)) })
        })?;
    }
    Ok(())
}

#[test]
fn children_are_on_the_node_and_die_with_it() -> Result<()> {
    use std::process::Stdio;
    let pid = std::sync::Mutex::new(None);
    lab_test(|| {
        let _lab = Lab::builder().clients(1).start()?;
        let listing = command("ls").args(["/run/netns", "/sys/fs/bpf/tc/globals"]).output()?;
        let listing = String::from_utf8_lossy(&listing.stdout).into_owned();
        ensure!(
            listing.contains("cni-client0") && listing.contains("cilium_ct_any4_global"),
            "listed {listing}"
        );
        let child = command("sleep").arg("1000").stdin(Stdio::null()).spawn()?;
        *pid.lock().map_err(|_| anyhow::anyhow!("poisoned"))? = Some(child);
        Ok(())
    })?;
    let child = pid.lock().map_err(|_| anyhow::anyhow!("poisoned"))?.take();
    if let Some(mut child) = child {
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while child.try_wait()?.is_none() {
            ensure!(std::time::Instant::now() < deadline, "the child outlived its node");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}
