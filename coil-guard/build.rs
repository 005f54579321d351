//! Builds the TC programs into `OUT_DIR`.

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=../coil-guard-common/src");
    ebpf_build::build(
        "coil-guard-ebpf",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../coil-guard-ebpf"),
        &["coil-guard-bpf", "coil-guard-replies-bpf", "coil-guard-stub-bpf"],
    )
}
