//! The arguments of each command.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use super::values::{
    Address, Attach, CiliumAccess, DefaultMode, duration, entries, interval, log_level, not_ready_after, port,
};
use crate::{
    check::Check,
    datapath::{Options, Sizes},
    index::NotReadyAfter,
    observe::LogFormat,
    plan::Settings,
};

/// Moves Coil's FoU flows off leaving egress pods at once, on clusters whose load balancer is Cilium.
///
/// A client pod of a Coil Egress stays on an egress pod that is being deleted for as long as Cilium's conntrack entry
/// lives. coil-guard attaches a program inside the client pod that moves such a flow to a live egress pod with its next
/// packet (reset), or keeps existing inner connections where they are and moves the new ones only (drain). Where nothing may write
/// to Cilium's maps, it gives the flow another source port, so that Cilium chooses anew (rewrite).
///
/// What is done is chosen for each Egress by the annotation coil-guard.io/mode: off, audit, reset, drain or
/// rewrite.
#[derive(Debug, Parser)]
#[command(name = "coil-guard", version, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent of a node
    ///
    /// Watches Egresses, their Services, EndpointSlices and pods, and the pods of this node, and guards those that are
    /// clients of an Egress whose mode is not off. Needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN.
    ///
    /// Only one agent at a time works on a node: a second one waits, not ready, until the first ends. When the agent
    /// ends, by SIGTERM or otherwise, programs and maps stay in the kernel and go on guarding; `coil-guard cleanup`
    /// removes them.
    Run(Box<RunArguments>),
    /// Show what is guarded on this node, and what is wrong, from the maps in the kernel
    ///
    /// Needs no running agent. By Egress: its mode, its clients, each backend as the agent and as Cilium see it, flows moved,
    /// draining and cut, and the last cutover. What cannot be read from Cilium's maps is left out, and said.
    Status(StatusArguments),
    /// See beforehand whether this node can be guarded
    ///
    /// Looks at the kernel, the bpf file system, Cilium's maps and whether Cilium balances packets (and not sockets), the
    /// pods' namespaces, Coil's CRD, the rights at the Kubernetes API, and how long a drain of each guarded Egress can
    /// really last. Changes nothing. Ends with 0 if all is well, 1 with warnings, 2 if it cannot work.
    Check(Box<CheckArguments>),
    /// Remove every program, filter, pin and map of the guard from this node
    ///
    /// Refuses while an agent is running. Flows stay where they are; Cilium's own maps are not touched.
    Cleanup(CleanupArguments),
}

/// Where things are on the node.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Node")]
pub struct NodeArguments {
    /// UDP port of Coil's tunnels, the same as in the flags of coild and coil-egress
    #[arg(long, env = "COIL_GUARD_FOU_PORT", value_name = "PORT", default_value = "5555", value_parser = port)]
    pub fou_port: u16,

    /// Directory in which Cilium pins its maps
    #[arg(
        long,
        env = "COIL_GUARD_CILIUM_MAPS",
        value_name = "DIRECTORY",
        default_value = "/sys/fs/bpf/tc/globals"
    )]
    pub cilium_maps: PathBuf,

    /// Directory in which the container runtime keeps the pods' network namespaces
    ///
    /// For a runtime that keeps them nowhere, /proc: they are found by the processes in them, which needs the host's
    /// process namespace (hostPID) and CAP_SYS_PTRACE.
    #[arg(long, env = "COIL_GUARD_NETNS_DIR", value_name = "DIRECTORY", default_value = "/run/netns")]
    pub netns_dir: PathBuf,

    /// Directory for the guard's own pins, on a bpffs; made if missing
    #[arg(
        long,
        env = "COIL_GUARD_PIN_DIR",
        value_name = "DIRECTORY",
        default_value = "/sys/fs/bpf/coil-guard"
    )]
    pub pin_dir: PathBuf,

    /// How to attach: auto takes TCX where the kernel has it (6.6 and later) and clsact elsewhere
    #[arg(
        long,
        env = "COIL_GUARD_ATTACH",
        value_name = "KIND",
        value_enum,
        default_value = "auto",
        hide_possible_values = false
    )]
    pub attach: Attach,
}

/// How to reach the Kubernetes API.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub struct ApiArguments {
    /// Name of this node in the cluster
    #[arg(long, env = "COIL_GUARD_NODE_NAME", value_name = "NAME")]
    pub node_name: String,

    /// Kubeconfig file; otherwise KUBECONFIG, ~/.kube/config, or the pod's service account
    #[arg(long, env = "COIL_GUARD_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// How to log.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Log")]
pub(crate) struct LogArguments {
    /// How log lines look
    #[arg(long, env = "COIL_GUARD_LOG_FORMAT", value_name = "FORMAT", value_enum, default_value = "text")]
    pub(crate) log_format: LogFormat,

    /// error, warn, info, debug, trace, or a list such as info,coil_guard::k8s=debug
    ///
    /// Can be changed while the agent runs: `curl -X PUT --data debug http://127.0.0.1:9398/log-level`.
    #[arg(long, env = "COIL_GUARD_LOG_LEVEL", value_name = "LEVEL", default_value = "info", value_parser = log_level)]
    pub(crate) log_level: String,
}

/// Arguments of `run`.
#[derive(Clone, Debug, Args)]
pub struct RunArguments {
    #[command(flatten)]
    pub(crate) api: ApiArguments,
    #[command(flatten)]
    pub(crate) node: NodeArguments,
    #[command(flatten)]
    pub(crate) policy: PolicyArguments,
    #[command(flatten)]
    pub(crate) log: LogArguments,
    #[command(flatten)]
    pub(crate) endpoints: EndpointArguments,
    #[command(flatten)]
    pub(crate) sizes: SizeArguments,
}

/// What to do where no annotation says it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Policy")]
pub(crate) struct PolicyArguments {
    /// Mode of Egresses without the annotation coil-guard.io/mode
    ///
    /// The annotation wins. One that is not understood means off, whatever is set here.
    #[arg(long, env = "COIL_GUARD_DEFAULT_MODE", value_name = "MODE", value_enum, default_value = "off")]
    pub(crate) default_mode: DefaultMode,

    /// How long an egress pod that is not ready keeps the flows that it has: a duration, 0s for not at all, or never for
    /// as long as Cilium keeps them
    ///
    /// For Egresses without the annotation coil-guard.io/not-ready-after. FoU and NAT are kernel state, so a pod that
    /// fails its readiness probe usually still forwards.
    #[arg(long, env = "COIL_GUARD_NOT_READY_AFTER", value_name = "DURATION", default_value = "30s", value_parser = not_ready_after)]
    pub(crate) not_ready_after: NotReadyAfter,

    /// In mode drain: how long an egress pod that only Cilium knows to be leaving keeps its existing flows, while no
    /// agent tells more
    #[arg(long, env = "COIL_GUARD_UNMARKED_DRAIN", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub(crate) unmarked_drain: Duration,

    /// Whether the guard may write to Cilium's maps
    ///
    /// Modes reset and drain change entries of Cilium's conntrack map. With read-only, an Egress that asks for one of them
    /// is treated as off, which is told by an event, a warning and the metric coil_guard_refused_egresses; audit and rewrite
    /// work, and every program is loaded such that the kernel's verifier leaves out what would write.
    #[arg(
        long,
        env = "COIL_GUARD_CILIUM_ACCESS",
        value_name = "ACCESS",
        value_enum,
        default_value = "read-write"
    )]
    pub(crate) cilium_access: CiliumAccess,
}

impl PolicyArguments {
    fn read_only(&self) -> bool {
        self.cilium_access == CiliumAccess::ReadOnly
    }
}

/// Where to listen.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Endpoints")]
pub(crate) struct EndpointArguments {
    /// Address of /metrics; an empty value leaves it out
    #[arg(
        long,
        env = "COIL_GUARD_METRICS_ADDRESS",
        value_name = "ADDRESS:PORT",
        default_value = "0.0.0.0:9397"
    )]
    metrics_address: Address,

    /// Address of /livez, /readyz and /log-level; an empty value leaves it out
    ///
    /// Whoever can reach it can change the log level, so keep it on the loopback interface.
    #[arg(
        long,
        env = "COIL_GUARD_HEALTH_ADDRESS",
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:9398"
    )]
    health_address: Address,
}

impl EndpointArguments {
    pub(crate) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics_address.0
    }

    pub(crate) fn health(&self) -> Option<SocketAddr> {
        self.health_address.0
    }
}

/// Entries of the maps. Their memory is charged to the agent's container.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Map sizes (of maps that are made anew; pinned ones keep theirs)")]
pub(crate) struct SizeArguments {
    /// Guarded Service addresses
    #[arg(long, env = "COIL_GUARD_MAP_SERVICES", value_name = "ENTRIES", default_value_t = Sizes::default().services, value_parser = entries)]
    map_services: u32,
    /// Backend addresses
    #[arg(long, env = "COIL_GUARD_MAP_MARKS", value_name = "ENTRIES", default_value_t = Sizes::default().marks, value_parser = entries)]
    map_marks: u32,
    /// Inner flows remembered in mode drain; about 150 bytes each
    #[arg(long, env = "COIL_GUARD_MAP_INNER_FLOWS", value_name = "ENTRIES", default_value_t = Sizes::default().inner_flows, value_parser = entries)]
    map_inner_flows: u32,
    /// Fragmented inner packets remembered at a time
    #[arg(long, env = "COIL_GUARD_MAP_FRAGMENTS", value_name = "ENTRIES", default_value_t = Sizes::default().fragments, value_parser = entries)]
    map_fragments: u32,
    /// Pairs of client and Service whose previous backend is remembered
    #[arg(long, env = "COIL_GUARD_MAP_PREVIOUS", value_name = "ENTRIES", default_value_t = Sizes::default().previous, value_parser = entries)]
    map_previous: u32,
    /// Flows that were given another source port in mode rewrite; with fouSourcePortAuto each inner flow is one
    #[arg(long, env = "COIL_GUARD_MAP_PINNED_PORTS", value_name = "ENTRIES", default_value_t = Sizes::default().pinned_ports, value_parser = entries)]
    map_pinned_ports: u32,
    /// Ports given in mode rewrite to clients that can have replies there
    #[arg(long, env = "COIL_GUARD_MAP_RETURNS", value_name = "ENTRIES", default_value_t = Sizes::default().returns, value_parser = entries)]
    map_returns: u32,
    /// Clients of this node's egress pods that are sent replies at another port, in mode rewrite
    #[arg(long, env = "COIL_GUARD_MAP_ANSWERS", value_name = "ENTRIES", default_value_t = Sizes::default().answers, value_parser = entries)]
    map_answers: u32,
    /// Backends seen leaving by Cilium's state alone
    #[arg(long, env = "COIL_GUARD_MAP_LEAVING", value_name = "ENTRIES", default_value_t = Sizes::default().leaving, value_parser = entries)]
    map_leaving: u32,
    /// Leaving backends with drain statistics
    #[arg(long, env = "COIL_GUARD_MAP_DRAINS", value_name = "ENTRIES", default_value_t = Sizes::default().drains, value_parser = entries)]
    map_drains: u32,
    /// Egresses with counters
    #[arg(long, env = "COIL_GUARD_MAP_EGRESSES", value_name = "ENTRIES", default_value_t = Sizes::default().egresses, value_parser = entries)]
    map_egresses: u32,
    /// Programs in pods of this node: one for each client pod, two with mode rewrite, and two for each egress pod of it
    #[arg(long, env = "COIL_GUARD_MAP_PODS", value_name = "ENTRIES", default_value_t = Sizes::default().pods, value_parser = entries)]
    map_pods: u32,
    /// Bytes of the ring of events; rounded up to a power of two
    #[arg(long, env = "COIL_GUARD_MAP_EVENT_BYTES", value_name = "BYTES", default_value_t = Sizes::default().event_bytes, value_parser = entries)]
    map_event_bytes: u32,
}

impl From<&SizeArguments> for Sizes {
    fn from(arguments: &SizeArguments) -> Self {
        Self {
            services: arguments.map_services,
            marks: arguments.map_marks,
            inner_flows: arguments.map_inner_flows,
            fragments: arguments.map_fragments,
            previous: arguments.map_previous,
            pinned_ports: arguments.map_pinned_ports,
            returns: arguments.map_returns,
            answers: arguments.map_answers,
            leaving: arguments.map_leaving,
            drains: arguments.map_drains,
            egresses: arguments.map_egresses,
            pods: arguments.map_pods,
            event_bytes: arguments.map_event_bytes,
        }
    }
}

impl From<&NodeArguments> for Options {
    fn from(node: &NodeArguments) -> Self {
        Self {
            pin_directory: node.pin_dir.clone(),
            cilium_directory: node.cilium_maps.clone(),
            namespace_directory: node.netns_dir.clone(),
            fou_port: node.fou_port,
            attach: node.attach.into(),
            ..Self::default()
        }
    }
}

impl RunArguments {
    /// What the datapath needs to know.
    #[must_use]
    pub fn datapath(&self) -> Options {
        Options {
            sizes: Sizes::from(&self.sizes),
            unmarked_drain: self.policy.unmarked_drain,
            read_only: self.policy.read_only(),
            ..Options::from(&self.node)
        }
    }

    /// What the plan needs to know.
    #[must_use]
    pub fn settings(&self) -> Settings {
        settings(&self.node, &self.policy)
    }
}

/// Arguments of `status`.
#[derive(Clone, Debug, Args)]
pub struct StatusArguments {
    /// Where things are.
    #[command(flatten)]
    pub node: NodeArguments,
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
    /// Show it again every so many seconds, until interrupted; with --json each time one line
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = interval)]
    pub watch: Option<Duration>,
}

/// Arguments of `check`.
#[derive(Clone, Debug, Args)]
pub struct CheckArguments {
    #[command(flatten)]
    pub(crate) api: ApiArguments,
    #[command(flatten)]
    pub(crate) node: NodeArguments,
    #[command(flatten)]
    pub(crate) policy: PolicyArguments,
    /// Print it as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Look at the node and at Cilium alone, and not at the Kubernetes API
    #[arg(long)]
    pub(crate) skip_api: bool,
}

impl From<&CheckArguments> for Check {
    fn from(arguments: &CheckArguments) -> Self {
        Self {
            datapath: Options::from(&arguments.node),
            settings: settings(&arguments.node, &arguments.policy),
            kubeconfig: arguments.api.kubeconfig.clone(),
            node_name: arguments.api.node_name.clone(),
            skip_api: arguments.skip_api,
        }
    }
}

fn settings(node: &NodeArguments, policy: &PolicyArguments) -> Settings {
    Settings {
        fou_port: node.fou_port,
        default_mode: policy.default_mode.into(),
        not_ready_after: policy.not_ready_after,
        read_only: policy.read_only(),
    }
}

/// Arguments of `cleanup`.
#[derive(Clone, Debug, Args)]
pub struct CleanupArguments {
    /// Where things are.
    #[command(flatten)]
    pub node: NodeArguments,
    /// When everything is removed, stay until SIGTERM instead of ending: a DaemonSet's pods have to stay
    #[arg(long)]
    pub stay: bool,
}

#[cfg(test)]
mod tests;
