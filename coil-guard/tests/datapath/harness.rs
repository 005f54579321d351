//! A node to oneself: private mount and network namespaces, a bpffs, maps with Cilium's names, pods.
//!
//! Everything hangs on the test's own thread and goes with it, whatever the test comes to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use aya::{
    maps::{MapData, MapInfo, MapType},
    programs::TcAttachType,
};
use coil_guard::{
    cilium::{MapSpec, SPECS4, SPECS6},
    clock::Monotonic,
    datapath::{AttachKind, Datapath, Opened, Options, Report},
    plan::{
        ClientPod, Desired, EgressName, GuardedService, Keep, Mark, MarkState, Mode, ServiceAddress, Want,
    },
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
};
use tokio::sync::mpsc::UnboundedReceiver;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Whether the test can run; says so loudly when it cannot.
pub(crate) fn can_run() -> bool {
    if nix::unistd::geteuid().is_root() {
        return true;
    }
    eprintln!("SKIPPED: needs root for namespaces and BPF");
    false
}

/// Polls until there is something, and says what was seen last when there is not.
pub(crate) fn eventually<T, S: std::fmt::Debug>(what: &str, mut look: impl FnMut() -> Result<T, S>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        match look() {
            Ok(value) => return value,
            Err(seen) => assert!(Instant::now() < end, "waited {DEADLINE:?} for {what}; last seen: {seen:?}"),
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A node.
pub(crate) struct Node {
    directory: tempfile::TempDir,
    pub(crate) options: Options,
}

impl Node {
    /// Takes the calling thread into namespaces of its own.
    pub(crate) fn new(attach: AttachKind) -> Self {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).expect("unshare");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .expect("private");
        let directory = tempfile::tempdir().expect("a temporary directory");
        // The files of the namespaces must go with this mount namespace, not stay in the machine's /tmp.
        mount(Some("none"), directory.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("tmpfs");
        let bpffs = directory.path().join("bpf");
        fs::create_dir(&bpffs).expect("a directory");
        mount(Some("bpf"), &bpffs, Some("bpf"), MsFlags::empty(), None::<&str>).expect("bpffs");
        let cilium = bpffs.join("tc/globals");
        fs::create_dir_all(&cilium).expect("a directory");
        let namespaces = directory.path().join("netns");
        fs::create_dir(&namespaces).expect("a directory");
        let options = Options {
            pin_directory: bpffs.join("coil-guard"),
            cilium_directory: cilium,
            namespace_directory: namespaces,
            attach,
            ..Options::default()
        };
        Self { directory, options }
    }

    pub(crate) fn layout(&self) -> PathBuf {
        self.options.layout_directory()
    }

    pub(crate) fn link(&self, uid: &str) -> PathBuf {
        self.layout().join("links").join(uid)
    }

    /// Makes Cilium's IPv4 maps, as it does with IPv6 off.
    pub(crate) fn cilium4(&self) {
        SPECS4.iter().for_each(|spec| self.cilium_map(spec));
    }

    pub(crate) fn cilium6(&self) {
        SPECS6.iter().for_each(|spec| self.cilium_map(spec));
    }

    pub(crate) fn cilium_map(&self, spec: &MapSpec) {
        self.map(spec.pin_name, spec.kind, spec.key_size, spec.value_size, 64, 0);
    }

    /// Makes a map in Cilium's directory in place of one that is there.
    pub(crate) fn map(&self, name: &str, kind: MapType, key: u32, value: u32, entries: u32, flags: u32) {
        let definition = aya_obj::Map::new_from_params(kind as u32, key, value, entries, flags);
        let map = MapData::create(definition, &name[..name.len().min(15)], None).expect("make a map");
        let path = self.options.cilium_directory.join(name);
        let _ = fs::remove_file(&path);
        map.pin(&path).expect("pin a map");
    }

    pub(crate) fn remove_cilium(&self) {
        for name in self.cilium_pins().keys() {
            fs::remove_file(self.options.cilium_directory.join(name)).expect("remove a pin");
        }
    }

    /// Name and id of everything in Cilium's directory.
    pub(crate) fn cilium_pins(&self) -> BTreeMap<String, u32> {
        names(&self.options.cilium_directory)
            .into_iter()
            .map(|name| {
                let id = MapInfo::from_pin(self.options.cilium_directory.join(&name)).expect("a map").id();
                (name, id)
            })
            .collect()
    }

    pub(crate) fn open(&self) -> Agent {
        match Datapath::try_open(&self.options).expect("open the datapath") {
            Opened::Datapath(mut datapath) => {
                let reports = datapath.take_reports();
                Agent { datapath, reports, seen: Vec::new() }
            }
            Opened::Busy(path) => panic!("{} is taken", path.display()),
        }
    }

    /// Makes a pod's namespace with `eth0` holding `addresses`.
    pub(crate) fn pod(&self, name: &str, addresses: &[&str]) -> PodNamespace {
        let path = self.options.namespace_directory.join(format!("cni-{name}"));
        File::create(&path).expect("a file");
        let target = path.clone();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("unshare");
            mount(Some("/proc/thread-self/ns/net"), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .expect("bind the namespace");
        })
        .join()
        .expect("make a namespace");
        let namespace = PodNamespace { path };
        namespace.add_interface(addresses);
        namespace
    }

    /// What is left below the pin directory.
    pub(crate) fn pins(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        walk(&self.options.pin_directory, &mut found);
        found
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
    for name in names(directory) {
        let path = directory.join(name);
        found.push(path.clone());
        if path.is_dir() {
            walk(&path, found);
        }
    }
}

fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
}

/// A pod's namespace.
pub(crate) struct PodNamespace {
    pub(crate) path: PathBuf,
}

impl PodNamespace {
    pub(crate) fn add_interface(&self, addresses: &[&str]) {
        self.run("ip link add eth0 type veth peer name peer0");
        for address in addresses {
            let length = if address.contains(':') { 128 } else { 32 };
            let nodad = if address.contains(':') { " nodad" } else { "" };
            self.run(&format!("ip addr add {address}/{length} dev eth0{nodad}"));
        }
        self.run("ip link set peer0 up");
        self.run("ip link set eth0 up");
    }

    /// Runs a command inside, and gives what it printed.
    pub(crate) fn run(&self, command: &str) -> String {
        self.within(|| {
            let mut words = command.split(' ');
            let output = Command::new(words.next().expect("a command")).args(words).output().expect("run");
            assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        })
    }

    pub(crate) fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(File::open(&self.path).expect("a namespace"), CloneFlags::CLONE_NEWNET)
                        .expect("setns");
                    work()
                })
                .join()
                .expect("work in the namespace")
        })
    }

    /// What `tc` says of our filters.
    pub(crate) fn filters(&self) -> usize {
        self.run("tc filter show dev eth0 egress").matches(" handle 0x636f coil_guard ").count()
    }

    pub(crate) fn has_qdisc(&self) -> bool {
        self.run("tc qdisc show dev eth0").contains("clsact")
    }

    /// Ids of the TCX programs on eth0's egress, in order.
    pub(crate) fn tcx(&self) -> Vec<u32> {
        self.tcx_on(TcAttachType::Egress)
    }

    /// As [`Self::tcx`], on either hook.
    pub(crate) fn tcx_on(&self, hook: TcAttachType) -> Vec<u32> {
        self.within(|| {
            aya::programs::SchedClassifier::query_tcx("eth0", hook)
                .map(|(_, programs)| programs.iter().map(aya::programs::ProgramInfo::id).collect())
                .unwrap_or_default()
        })
    }
}

/// The datapath with what it reported.
pub(crate) struct Agent {
    pub(crate) datapath: Datapath,
    reports: UnboundedReceiver<Report>,
    seen: Vec<String>,
}

impl Agent {
    pub(crate) fn apply(&mut self, desired: &Desired) {
        let applied = self.datapath.apply(desired, Monotonic::now());
        assert!(applied.errors.is_empty(), "{:?}", applied.errors);
    }

    /// Waits for a report that `pick` takes.
    pub(crate) fn report<T>(&mut self, what: &str, pick: impl Fn(&Report) -> Option<T>) -> T {
        let (reports, seen) = (&mut self.reports, &mut self.seen);
        eventually(what, || {
            while let Ok(report) = reports.try_recv() {
                seen.push(format!("{report:?}"));
                if let Some(value) = pick(&report) {
                    return Ok(value);
                }
            }
            Err(seen.clone())
        })
    }
}

pub(crate) const SERVICE: &str = "10.96.0.10";

pub(crate) fn egress() -> EgressName {
    EgressName { namespace: "internet".into(), name: "egress".into() }
}

pub(crate) fn service() -> ServiceAddress {
    ServiceAddress { address: ip(SERVICE), port: 5555 }
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn mark(state: MarkState, keep: Keep) -> Mark {
    Mark { egress: egress(), state, keep, since: Monotonic(7) }
}

/// One guarded service and the pods given.
pub(crate) fn desired(mode: Mode, pods: &[(&str, &[&str])]) -> Desired {
    Desired {
        complete: true,
        services: [(service(), GuardedService { egress: egress(), mode, sport_auto: false })].into(),
        marks: BTreeMap::new(),
        pods: pods
            .iter()
            .map(|(uid, addresses)| {
                let pod = client(uid, addresses, Want::Attached);
                ((*uid).to_owned(), ClientPod { read_only: !mode.writes(), ..pod })
            })
            .collect(),
        egress_pods: BTreeMap::new(),
        next_change: None,
    }
}

pub(crate) fn client(uid: &str, addresses: &[&str], want: Want) -> ClientPod {
    ClientPod {
        namespace: "default".into(),
        name: format!("client-{uid}"),
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        want,
        egresses: BTreeSet::from([egress()]),
        read_only: false,
        symmetric: false,
    }
}

/// A complete plan in which nothing is guarded.
pub(crate) fn nothing() -> Desired {
    Desired { complete: true, ..Desired::default() }
}
