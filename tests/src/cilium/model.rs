//! Loads, attaches and steers the model of Cilium's load balancer.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, MapData},
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        tc::{self, NlOptions, SchedClassifierLinkId, TcAttachOptions},
    },
};

use super::{maps::CiliumMaps, version::CiliumVersion};

mod abi {
    #![expect(
        unreachable_pub,
        dead_code,
        reason = "shared with the program, where it is a module of the crate"
    )]
    include!("../../cilium-model/src/abi.rs");
}
pub use abi::{Settings, Stat};

/// The program's object, empty when it was built without an eBPF toolchain.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/cilium-model-bpf"));

const FROM_CONTAINER: &str = "model_from_container";
const TO_CONTAINER: &str = "model_to_container";

/// How a program is attached to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachKind {
    /// A TCX link, last in order (kernel 6.6 and later).
    Tcx,
    /// A filter of the clsact qdisc, priority 1, handle 1.
    Clsact,
}

impl AttachKind {
    /// What Cilium takes on this kernel.
    #[must_use]
    pub fn preferred() -> Self {
        if kernel_has_tcx() { Self::Tcx } else { Self::Clsact }
    }
}

/// Whether this kernel has TCX, by its version (6.6).
#[must_use]
pub fn kernel_has_tcx() -> bool {
    use aya::util::KernelVersion;
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

/// Ingress policy of the client pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Everything may come in.
    Allow,
    /// Only replies may come in.
    DefaultDeny,
}

/// The loaded model. Dropping it detaches it.
#[derive(Debug)]
pub struct Model {
    ebpf: Ebpf,
    settings: Settings,
    attached: Vec<(&'static str, SchedClassifierLinkId)>,
    devices: Vec<String>,
}

impl Model {
    /// Loads the model over the pinned maps. A map that was left out is an empty private one.
    ///
    /// # Errors
    ///
    /// When the program was left out of the build, a pin is missing, or the kernel refuses.
    pub fn load(maps: &CiliumMaps, settings: Settings) -> Result<Self> {
        let ebpf = load(maps)?;
        let mut model = Self { ebpf, settings, attached: Vec::new(), devices: Vec::new() };
        model.configure(|_| {})?;
        Ok(model)
    }

    /// Settings of a version: lifetime 60 s, everything allowed, random selection.
    #[must_use]
    pub fn default_settings(version: CiliumVersion) -> Settings {
        Settings {
            minor: version.minor(),
            lifetime: 60,
            identity: 10_010,
            remote_identity: 10,
            pick: 0,
            default_deny: 0,
            early_count_check: 0,
            reserved: 0,
        }
    }

    /// Attaches to the host side of a client pod, both directions. In the namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn attach(&mut self, device: &str, kind: AttachKind) -> Result<()> {
        if kind == AttachKind::Clsact {
            tc::qdisc_add_clsact(device).with_context(|| format!("cannot add clsact to {device}"))?;
        }
        for (name, hook) in [(FROM_CONTAINER, TcAttachType::Ingress), (TO_CONTAINER, TcAttachType::Egress)] {
            let options = match kind {
                AttachKind::Tcx => TcAttachOptions::TcxOrder(LinkOrder::last()),
                AttachKind::Clsact => TcAttachOptions::Netlink(NlOptions {
                    priority: 1,
                    handle: 1.into(),
                    ..NlOptions::default()
                }),
            };
            let link = program(&mut self.ebpf, name)?
                .attach_with_options(device, hook, options)
                .with_context(|| format!("cannot attach {name} to {device}"))?;
            self.attached.push((name, link));
        }
        self.devices.push(device.to_owned());
        Ok(())
    }

    /// Loads the program anew over what is pinned now and replaces the old one in its links: no packet goes by
    /// untranslated. In the namespace of the devices.
    ///
    /// # Errors
    ///
    /// As [`Self::load`] and [`Self::attach`].
    pub fn reload(&mut self, maps: &CiliumMaps) -> Result<()> {
        let mut new = load(maps)?;
        write_settings(&mut new, self.settings)?;
        let mut attached = Vec::new();
        for (name, link) in self.attached.drain(..) {
            let link = program(&mut self.ebpf, name)?.take_link(link)?;
            attached.push((name, program(&mut new, name)?.attach_to_link(link)?));
        }
        self.attached = attached;
        self.ebpf = new;
        Ok(())
    }

    /// Changes settings; they hold from the next packet on.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn configure(&mut self, change: impl FnOnce(&mut Settings)) -> Result<()> {
        change(&mut self.settings);
        write_settings(&mut self.ebpf, self.settings)
    }

    /// The settings that hold.
    #[must_use]
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Lifetime that packets give their conntrack entries, in whole seconds (rounded up).
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn set_lifetime(&mut self, lifetime: Duration) -> Result<()> {
        let seconds = lifetime.as_secs() + u64::from(lifetime.subsec_nanos() > 0);
        self.configure(|settings| settings.lifetime = seconds as u32)
    }

    /// Ingress policy of the client pods.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn set_policy(&mut self, policy: Policy) -> Result<()> {
        self.configure(|settings| settings.default_deny = u32::from(policy == Policy::DefaultDeny))
    }

    /// Makes new flows go to slot `slot` (1 to count), or to a random one again.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn pick(&mut self, slot: Option<u32>) -> Result<()> {
        self.configure(|settings| settings.pick = slot.unwrap_or(0))
    }

    /// A counter.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn stat(&self, stat: Stat) -> Result<u64> {
        let map = self.ebpf.map("MODEL_STATS").context("the model has no statistics")?;
        Ok(Array::<&MapData, u64>::try_from(map)?.get(&(stat as u32), 0)?)
    }

    /// Kernel ids of its programs.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn program_ids(&self) -> Result<Vec<u32>> {
        self.ebpf.programs().map(|(_, program)| Ok(program.info()?.id())).collect()
    }

    /// Host-side devices that it is attached to.
    #[must_use]
    pub fn devices(&self) -> &[String] {
        &self.devices
    }
}

fn load(maps: &CiliumMaps) -> Result<Ebpf> {
    if OBJECT.is_empty() {
        bail!(
            "the model of Cilium was built without an eBPF toolchain: run `cargo xtask setup`, then build again"
        );
    }
    let names: Vec<_> = maps.names().collect();
    let mut loader = EbpfLoader::new();
    for name in &names {
        let path = maps.path(name);
        ensure!(path.exists(), "the model needs {} at {}, and nothing is pinned there", name, path.display());
        loader.map_pin_path(name, path);
    }
    let mut ebpf = loader.load(OBJECT).context("cannot load the model of Cilium")?;
    for name in [FROM_CONTAINER, TO_CONTAINER] {
        program(&mut ebpf, name)?.load().with_context(|| format!("the kernel refused {name}"))?;
    }
    Ok(ebpf)
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let program = ebpf.program_mut(name).with_context(|| format!("the object has no program {name}"))?;
    Ok(program.try_into()?)
}

fn write_settings(ebpf: &mut Ebpf, settings: Settings) -> Result<()> {
    let Settings {
        minor,
        lifetime,
        identity,
        remote_identity,
        pick,
        default_deny,
        early_count_check,
        reserved,
    } = settings;
    let words = [minor, lifetime, identity, remote_identity, pick, default_deny, early_count_check, reserved];
    let map = ebpf.map_mut("MODEL_SETTINGS").context("the model has no settings")?;
    Array::<&mut MapData, [u32; 8]>::try_from(map)?.set(0, words, 0)?;
    Ok(())
}
