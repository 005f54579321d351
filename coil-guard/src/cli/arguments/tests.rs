//! What the command line accepts, and what it says of what it does not.

use clap::CommandFactory as _;

use super::*;

fn parse(arguments: &[&str]) -> Result<Cli, String> {
    Cli::try_parse_from(["coil-guard"].iter().chain(arguments)).map_err(|error| error.to_string())
}

fn run(arguments: &[&str]) -> Box<RunArguments> {
    let all: Vec<&str> = ["run", "--node-name", "n"].iter().chain(arguments).copied().collect();
    match parse(&all).unwrap().command {
        Command::Run(run) => run,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn defaults_are_those_of_the_parts() {
    let run = run(&[]);
    assert_eq!(run.datapath(), Options::default());
    assert_eq!(run.settings(), Settings::default());
    assert_eq!(run.endpoints.metrics(), Some("0.0.0.0:9397".parse().unwrap()));
    assert_eq!(run.endpoints.health(), Some("127.0.0.1:9398".parse().unwrap()));
}

#[test]
fn an_empty_address_leaves_the_endpoint_out() {
    assert_eq!(run(&["--metrics-address", ""]).endpoints.metrics(), None);
}

#[test]
fn an_invalid_value_names_the_flag_and_what_is_allowed() {
    for (flag, value, allowed) in [
        ("--default-mode", "on", "off, audit, reset, drain, rewrite"),
        ("--attach", "xdp", "auto, tcx, clsact"),
        ("--log-format", "xml", "text, json"),
        ("--fou-port", "0", "a port from 1 to 65535 is expected"),
        ("--not-ready-after", "soon", "a duration such as 0s, 30s or 10m, or never, is expected"),
        ("--unmarked-drain", "5", "a duration such as 5s, 90s or 10m is expected"),
        ("--map-marks", "0", "a number from 1 to 67108864 is expected"),
        ("--log-level", "coil_guard=loud", "allowed are error, warn, info, debug, trace"),
        ("--metrics-address", "9397", "an address and a port are expected"),
    ] {
        let error = parse(&["run", "--node-name", "n", flag, value]).unwrap_err();
        assert!(error.contains(flag) && error.contains(allowed), "{error}");
    }
    let error = parse(&["run"]).unwrap_err();
    assert!(error.contains("--node-name"), "{error}");
}

#[test]
fn status_is_repeated_every_two_seconds_or_as_often_as_told() {
    let watch = |arguments: &[&str]| match parse(arguments).unwrap().command {
        Command::Status(status) => (status.watch, status.json),
        other => panic!("{other:?}"),
    };
    assert_eq!(watch(&["status"]), (None, false));
    assert_eq!(watch(&["status", "--watch", "--json"]), (Some(Duration::from_secs(2)), true));
    assert_eq!(watch(&["status", "--watch", "0.5"]), (Some(Duration::from_millis(500)), false));
    for value in ["0", "-1", "soon", "1e9", "NaN"] {
        let error = parse(&["status", &format!("--watch={value}")]).unwrap_err();
        assert!(error.contains("--watch") && error.contains("seconds from 0.1 to 86400"), "{error}");
    }
}

#[test]
fn every_flag_has_an_environment_name_of_ours_and_a_help_text() {
    let command = Cli::command();
    let run = command.find_subcommand("run").unwrap();
    for argument in run.get_arguments().filter(|argument| argument.get_id() != "help") {
        let flag = argument.get_long().unwrap();
        let expected = format!("COIL_GUARD_{}", flag.to_uppercase().replace('-', "_"));
        assert_eq!(argument.get_env().and_then(|name| name.to_str()), Some(expected.as_str()));
        assert!(argument.get_help().is_some(), "--{flag} has no help");
    }
}
