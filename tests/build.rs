//! Builds the model of Cilium's load balancer into `OUT_DIR`.

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=../coil-guard-common/src");
    ebpf_build::build(
        "cilium-model",
        concat!(env!("CARGO_MANIFEST_DIR"), "/cilium-model"),
        &["cilium-model-bpf"],
    )
}
