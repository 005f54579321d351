//! Mode `rewrite`: a rolling restart as in reset, where Cilium can choose anew, without a write to its maps.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use coil_guard_tests::{
    cilium::{CiliumVersion, IpFamily, MatchPolicy, Policy},
    lab::{Lab, LabBuilder},
    net::lab_test,
    scenario::{Scenario, ScenarioBuilder},
};

use crate::{
    coil::{Form, Tunnels},
    reset::{nothing_stalls, nothing_stalls_in},
    tcp::{self, Bulk},
    world::{FAMILIES, PATIENCE, World},
};

/// Coil's default affinity, which this Cilium does not keep to a leaving backend.
fn lets_go() -> LabBuilder {
    let affinity = Some(Duration::from_secs(10_800));
    Lab::builder().version(CiliumVersion::V1_20).affinity(affinity).match_policy(MatchPolicy::Dropped)
}

fn without_affinity() -> LabBuilder {
    Lab::builder().version(CiliumVersion::V1_16)
}

#[test]
fn rewrite_stalls_nothing_while_every_egress_pod_is_replaced() -> Result<()> {
    nothing_stalls("rewrite", lets_go, Tunnels::COIL)
}

#[test]
fn rewrite_stalls_nothing_with_source_ports_by_inner_flow() -> Result<()> {
    nothing_stalls("rewrite", without_affinity, Tunnels { sport_auto: true, ..Tunnels::COIL })
}

/// In a cluster whose policy lets nothing into a client but replies, and whose egress pods are on a node with the guard.
fn symmetric(lab: LabBuilder) -> ScenarioBuilder {
    Scenario::builder(lab.policy(Policy::DefaultDeny)).mode("rewrite").local_backends()
}

#[test]
fn under_default_deny_rewrite_stalls_nothing_where_both_ends_are_guarded() -> Result<()> {
    nothing_stalls_in(&symmetric, lets_go, Tunnels::COIL)
}

/// Super-packets, and checksums that nobody trusts blindly, under a given port.
#[test]
fn bulk_goes_whole_under_a_given_port() -> Result<()> {
    for family in FAMILIES {
        for form in [Form::Coil, Form::Checksums] {
            bulk(family, form, false).with_context(|| format!("{family:?} {form:?}"))?;
        }
    }
    Ok(())
}

/// As above, and the way back too: replies are sent to the given port and turned back, or the policy drops them.
#[test]
fn bulk_goes_whole_both_ways_where_both_ends_are_guarded() -> Result<()> {
    for family in FAMILIES {
        bulk(family, Form::Checksums, true).with_context(|| format!("{family:?}"))?;
    }
    Ok(())
}

fn bulk(family: IpFamily, form: Form, both_ends: bool) -> Result<()> {
    lab_test(|| {
        let builder =
            if both_ends { symmetric(lets_go()) } else { Scenario::builder(lets_go()).mode("rewrite") };
        let mut world = World::start(builder, Tunnels { form, sport_auto: false })?;
        let old = tcp::short(world.client(), family, PATIENCE)?;
        let old = world.index_of(old)?;
        world.begin_to_delete(old)?;
        for offload in [true, false] {
            world.set_checksum_offload(offload)?;
            let bulk = Bulk::start(world.client(), family)?;
            let new = world.index_of(bulk.via())?;
            ensure!(new != old, "a new connection went to the leaving pod {old}");
            bulk.wait_progress(8 << 20, PATIENCE)?;
            bulk.finish()?;
        }
        let agent = world.scenario.agent()?;
        let rewritten = agent.metric("coil_guard_egress_actions_total", &["action=\"rewritten\""])?;
        ensure!(rewritten > 100.0, "the transfers went by the FoU port");
        let returned = agent.metric("coil_guard_reply_packets_total", &["action=\"returned\""])?;
        ensure!((returned > 100.0) == both_ends, "{returned} replies were turned back");
        world.ensure_no_checksum_errors()
    })
}
