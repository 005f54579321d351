//! Which kernel modules a guest needs, and in which order they load.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

/// What the tests need of the kernel beyond what is built in.
pub(crate) const WANTED: [&str; 25] = [
    // How results leave the guest.
    "virtio_pci",
    "virtio_console",
    // The tunnels: ip(8) does not load them by itself.
    "fou",
    "fou6",
    "ipip",
    "ip6_tunnel",
    // The nodes and pods.
    "veth",
    "dummy",
    "bridge",
    // Where the guard and the model of Cilium attach.
    "cls_bpf",
    "sch_ingress",
    "sch_netem",
    "sch_fq",
    // The egress pod's masquerade, and what reads its state.
    "nf_tables",
    "nf_nat",
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nft_chain_nat",
    "nft_masq",
    "nft_nat",
    "nft_ct",
    // What the tests look through: sockets and raw packets.
    "af_packet",
    "inet_diag",
    "udp_diag",
    "tcp_diag",
];

/// The files to load, in order, for `wanted` and all that they depend on.
///
/// `dep` is the text of depmod's `modules.dep`, `builtin` the kernel's `modules.builtin`.
pub(crate) fn order(wanted: &[&str], dep: &str, builtin: &str) -> Result<Vec<String>> {
    let dependencies: BTreeMap<String, (&str, Vec<&str>)> = dep
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needs)| (name(path), (path, needs.split_whitespace().collect())))
        .collect();
    let built_in: Vec<String> = builtin.lines().map(name).collect();
    let mut ordered: Vec<String> = Vec::new();
    for module in wanted {
        let Some((path, needs)) = dependencies.get(*module) else {
            if built_in.iter().any(|built| built == module) {
                continue;
            }
            bail!("the kernel has no module {module}, and it is not built in");
        };
        // depmod lists what is needed from the nearest to the deepest.
        for file in needs.iter().rev().chain([path]) {
            if !ordered.iter().any(|present| present == file) {
                ordered.push((*file).to_owned());
            }
        }
    }
    Ok(ordered)
}

/// The name of a module by its file: dashes and underscores mean the same.
fn name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::order;

    const DEP: &str = "kernel/net/fou6.ko.xz: kernel/net/fou.ko.xz kernel/net/ip6-udp-tunnel.ko.xz kernel/net/udp.ko.xz\n\
                       kernel/net/fou.ko.xz: kernel/net/ip6-udp-tunnel.ko.xz kernel/net/udp.ko.xz\n\
                       kernel/net/ip6-udp-tunnel.ko.xz:\nkernel/net/udp.ko.xz:\nkernel/net/veth.ko.xz:\n";

    #[test]
    fn what_a_module_depends_on_comes_before_it_and_once() {
        let files = order(&["fou", "fou6", "veth"], DEP, "").unwrap();
        let names: Vec<&str> = files.iter().map(|file| file.trim_start_matches("kernel/net/")).collect();
        assert_eq!(names, ["udp.ko.xz", "ip6-udp-tunnel.ko.xz", "fou.ko.xz", "fou6.ko.xz", "veth.ko.xz"]);
    }

    #[test]
    fn a_built_in_module_needs_no_file_and_an_unknown_one_is_an_error() {
        assert!(order(&["virtio_pci"], DEP, "kernel/drivers/virtio/virtio_pci.ko\n").unwrap().is_empty());
        let error = order(&["netkit"], DEP, "").unwrap_err().to_string();
        assert!(error.contains("netkit"), "{error}");
    }
}
