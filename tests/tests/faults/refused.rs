//! A program that the kernel's verifier refuses.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use coil_guard_tests::{
    cilium::IpFamily,
    fou::FOU_PORT,
    lab::{Lab, eventually},
    net::lab_test,
    scenario::{Agent, Scenario},
};

use crate::support::{counted, finish, leaves_nothing, link_id, sent, streams, wait_left};

/// The pods' programs stay as they are, and the core is the one of the agent before. An agent without CAP_PERFMON and CAP_SYS_ADMIN may load programs, but only such as do no arithmetic with pointers: its verifier
/// refuses the guard, as another kernel's might.
#[test]
fn a_refused_program_is_told_at_once_and_the_one_before_goes_on_guarding() -> Result<()> {
    lab_test(|| {
        let mut scenario =
            Scenario::builder(Lab::builder()).mode("reset").arguments(&["--attach", "tcx"]).start()?;
        let link = link_id(&scenario, 0)?;
        let running = streams(&scenario, &[0], Duration::from_millis(2))?;
        scenario.kill_agent()?;
        let fewer = ["setpriv", "--bounding-set", "-all,+bpf,+net_admin,+dac_override", "--inh-caps", "-all"];
        scenario.agent = Some(Agent::start_under(&fewer, &scenario.api, &[])?);
        let since = Instant::now();
        let reported = eventually("refusal in /readyz", scenario.patience(), || {
            Ok(match scenario.agent()?.ready() {
                Ok((false, body)) if body.contains("[-]program") && body.contains("refuses the program") => {
                    Ok(body)
                }
                other => Err(format!("{other:?}")),
            })
        });
        let body = scenario.explain(reported)?;
        eprintln!("told after {:.1?}: {body}", since.elapsed());
        ensure!(body.contains("verifier says") && !body.contains("verifier says: nothing"), "{body}");
        ensure!(!body.contains("not been looked at"), "{body}");
        ensure!(since.elapsed() < Duration::from_secs(10), "told after {:?} only", since.elapsed());
        scenario.agent()?.wait_log(
            &["ERROR", "cannot load the core program", "refuses the program"],
            scenario.patience(),
        )?;
        // Guarded as before, by the core of the agent before.
        let bound = scenario.bound(0, IpFamily::V4, FOU_PORT)?;
        scenario.terminate(bound)?;
        wait_left(&scenario, &[0], bound)?;
        let log = scenario.agent()?.log();
        let told = log.lines().filter(|line| line.contains("cannot load the core program")).count();
        ensure!(told == 1, "told {told} times:\n{log}");
        scenario.kill_agent()?;
        scenario.start_agent()?;
        ensure!(link_id(&scenario, 0)? == link, "another link");
        counted(&scenario, sent(&finish(running)?))?;
        leaves_nothing(&scenario, &[0])
    })
}
