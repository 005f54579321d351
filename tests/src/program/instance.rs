//! The guard's programs, loaded, and what one packet did.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use aya::{
    Ebpf, Pod,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, ProgramArray, RingBuf},
    programs::SchedClassifier,
};
use coil_guard_common::{
    abi::{
        AgentState, BackendMark, CORE_PROGRAM, ClientServiceKey, DrainStats, EgressCounters, Event,
        FragmentKey, FragmentPorts, GuardedService, InnerFlow, InnerFlowKey, LeavingKey, LeavingSeen,
        PROGRAM, PinnedPort, PinnedPortKey, PodConfig, Previous, ReportKey, Return, ReturnKey, Returning,
        ServiceKey, core_slot, maps,
    },
    counters::Reason,
};
use zerocopy::FromBytes as _;

use super::{
    counters::{Counters, total},
    loading::{self, Load},
    recent,
};
use crate::cilium::{CiliumMaps, CiliumVersion, MapOptions, RawMap};

/// Path of an object to use in place of the agent's: to compare two builds.
const OBJECT_VARIABLE: &str = "COIL_GUARD_OBJECT";

/// Capacities of the instance's own maps.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// `GUARDED_SERVICES`
    pub services: u32,
    /// `INNER_FLOWS`
    pub inner_flows: u32,
    /// All other hash maps.
    pub others: u32,
    /// Cilium's maps: what is walked often should be small.
    pub cilium: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { services: 64, inner_flows: 4096, others: 4096, cilium: 65_536 }
    }
}

/// The core and the stub of one pod, with maps that nobody else uses.
pub struct Instance {
    ebpf: Ebpf,
    stub: Ebpf,
    cores: ProgramArray<MapData>,
    events: RingBuf<MapData>,
    cilium: CiliumMaps,
    directory: PathBuf,
    /// What loading the core cost.
    pub load: Load,
    /// What loading the stub cost.
    pub stub_load: Load,
    /// Whether what the core looked up a moment ago outlives a change of a map, as it does until the next tick of the clock.
    pub keeps_recent: bool,
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instance").field("load", &self.load).finish_non_exhaustive()
    }
}

impl Instance {
    /// Loads the core and the stub of the pod of `config`, over new maps as Cilium `version` makes them, pinned in `directory`,
    /// which has to be on a bpffs and be used for nothing else.
    ///
    /// # Errors
    ///
    /// When the agent was built without a program, or the kernel refuses it.
    pub fn load(directory: &Path, version: CiliumVersion, config: &PodConfig, sizes: Sizes) -> Result<Self> {
        match env::var_os(OBJECT_VARIABLE) {
            Some(path) => {
                let object = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
                Self::load_object(&object, directory, version, config, sizes)
            }
            None => Self::load_object(coil_guard::datapath::OBJECT, directory, version, config, sizes),
        }
    }

    /// As [`Self::load`], another build of the core.
    ///
    /// # Errors
    ///
    /// As [`Self::load`].
    pub fn load_object(
        object: &[u8],
        directory: &Path,
        version: CiliumVersion,
        config: &PodConfig,
        sizes: Sizes,
    ) -> Result<Self> {
        let (conntrack_entries, service_entries) = (sizes.cilium, sizes.cilium);
        let options = MapOptions { conntrack_entries, service_entries, ..MapOptions::new(version) };
        Self::load_over(object, directory, options, config, sizes, false)
    }

    /// Loads the core as the agent does, or the one that only reads Cilium's maps, over maps of these options.
    ///
    /// # Errors
    ///
    /// As [`Self::load`].
    pub fn load_core(
        directory: &Path,
        maps: MapOptions,
        config: &PodConfig,
        read_only: bool,
    ) -> Result<Self> {
        let object = coil_guard::datapath::OBJECT;
        Self::load_over(object, directory, maps, config, Sizes::default(), read_only)
    }

    fn load_over(
        object: &[u8],
        directory: &Path,
        options: MapOptions,
        config: &PodConfig,
        sizes: Sizes,
        read_only: bool,
    ) -> Result<Self> {
        let cilium = CiliumMaps::create(directory, options)?;
        ensure!(
            !object.is_empty(),
            "this build has no eBPF program: run `cargo xtask setup`, then build again"
        );
        let (mut ebpf, load) = loading::core(object, directory, &cilium, sizes, read_only)?;
        let events =
            RingBuf::try_from(ebpf.take_map(maps::EVENTS).context("the object has no ring buffer")?)?;
        let (mut stub, stub_load) = loading::stub(directory, config)?;
        let cores = ProgramArray::try_from(stub.take_map(maps::CORES).context("the stub has no cores")?)?;
        let mut instance = Self {
            ebpf,
            stub,
            cores,
            events,
            cilium,
            directory: directory.to_owned(),
            load,
            stub_load,
            keeps_recent: false,
        };
        instance.set_core(true)?;
        Ok(instance)
    }

    /// Puts the core into its place, or takes it away.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn set_core(&mut self, there: bool) -> Result<()> {
        let slot = u32::from(core_slot::GUARD);
        if there {
            let core: &SchedClassifier =
                self.ebpf.program(CORE_PROGRAM).context("the object has no core")?.try_into()?;
            self.cores.set(slot, core.fd()?, 0).context("cannot put the core into its place")
        } else {
            self.cores.clear_index(&slot).context("cannot take the core away")
        }
    }

    /// The stub of another pod, over the same core and maps, in place of the present one.
    ///
    /// # Errors
    ///
    /// When the kernel refuses it.
    pub fn become_pod(&mut self, config: &PodConfig) -> Result<()> {
        (self.stub, self.stub_load) = loading::stub(&self.directory, config)?;
        Ok(())
    }

    /// Cilium's maps.
    #[must_use]
    pub fn cilium(&self) -> &CiliumMaps {
        &self.cilium
    }

    pub(super) fn program(&self) -> Result<&SchedClassifier> {
        Ok(self.stub.program(PROGRAM).context("the object has no program")?.try_into()?)
    }

    /// One of the own hash maps.
    ///
    /// # Errors
    ///
    /// When it has other types.
    pub fn own<K: Pod, V: Pod>(&self, name: &str) -> Result<HashMap<&MapData, K, V>> {
        let map = self.ebpf.map(name).with_context(|| format!("the object has no map {name}"))?;
        HashMap::try_from(map).with_context(|| format!("map {name} has other types"))
    }

    /// A handle of one of the own hash maps for another thread.
    ///
    /// # Errors
    ///
    /// When it is none, or the kernel refuses.
    pub fn own_handle(&self, name: &str) -> Result<RawMap> {
        let Some(Map::HashMap(map)) = self.ebpf.map(name) else { bail!("the object has no hash map {name}") };
        RawMap::open_hash(name, &map.info()?)
    }

    fn own_mut<K: Pod, V: Pod>(&mut self, name: &str) -> Result<HashMap<&mut MapData, K, V>> {
        let map = self.ebpf.map_mut(name).with_context(|| format!("the object has no map {name}"))?;
        HashMap::try_from(map).with_context(|| format!("map {name} has other types"))
    }

    /// Sets an element of one of the own hash maps.
    ///
    /// # Errors
    ///
    /// When the map has other types or is full.
    pub fn set<K: Pod, V: Pod>(&mut self, name: &str, key: &K, value: &V) -> Result<()> {
        let mut map = self.own_mut::<K, V>(name)?;
        map.insert(key, value, 0).with_context(|| format!("cannot update map {name}"))?;
        self.changed(name)
    }

    /// Removes an element, if it is there, of one of the own hash maps.
    ///
    /// # Errors
    ///
    /// When the map has other types.
    pub fn unset<K: Pod, V: Pod>(&mut self, name: &str, key: &K) -> Result<()> {
        let mut map = self.own_mut::<K, V>(name)?;
        if map.get(key, 0).is_err() {
            return Ok(());
        }
        map.remove(key).with_context(|| format!("cannot delete from map {name}"))?;
        self.changed(name)
    }

    /// Sets the agent's sign of life.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn set_agent(&mut self, state: AgentState) -> Result<()> {
        let map = self.ebpf.map_mut(maps::AGENT).context("the object has no agent map")?;
        Array::<_, AgentState>::try_from(map)?.set(0, state, 0).context("cannot set the agent's state")
    }

    /// Empties every hash map, Cilium's and our own. Counters go on.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn clear(&mut self) -> Result<()> {
        for name in self.cilium.names() {
            let map = self.cilium.get(name)?;
            for key in map.dump()?.keys() {
                map.delete_bytes(key)?;
            }
        }
        self.empty::<ServiceKey, GuardedService>(maps::GUARDED_SERVICES)?;
        self.empty::<[u8; 16], BackendMark>(maps::BACKEND_MARKS)?;
        self.empty::<InnerFlowKey, InnerFlow>(maps::INNER_FLOWS)?;
        self.empty::<InnerFlowKey, InnerFlow>(maps::CROWDED_FLOWS)?;
        self.empty::<[u8; 16], u64>(maps::FLOW_SHARES)?;
        self.empty::<FragmentKey, FragmentPorts>(maps::FRAGMENTS)?;
        self.empty::<ClientServiceKey, Previous>(maps::PREVIOUS)?;
        self.empty::<PinnedPortKey, PinnedPort>(maps::PINNED_PORTS)?;
        self.empty::<[u8; 16], Returning>(maps::RETURNING)?;
        self.empty::<ReturnKey, Return>(maps::RETURNS)?;
        self.empty::<LeavingKey, LeavingSeen>(maps::LEAVING)?;
        self.empty::<[u8; 16], DrainStats>(maps::DRAINS)?;
        self.empty::<ReportKey, u64>(maps::REPORTED)?;
        self.set_agent(AgentState { heartbeat_until: 0, only_ready: 0 })?;
        self.take_events()?;
        self.forget_recent()
    }

    fn changed(&mut self, name: &str) -> Result<()> {
        if matches!(name, maps::GUARDED_SERVICES | maps::BACKEND_MARKS) {
            self.forget_recent()
        } else {
            Ok(())
        }
    }

    /// Makes the core look everything up again, as it does with each tick of the clock, unless that is to stay.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn forget_recent(&mut self) -> Result<()> {
        if self.keeps_recent { Ok(()) } else { recent::forget(&mut self.ebpf) }
    }

    fn empty<K: Pod, V: Pod>(&mut self, name: &str) -> Result<()> {
        let mut map = self.own_mut::<K, V>(name)?;
        let keys =
            map.keys().collect::<Result<Vec<_>, _>>().with_context(|| format!("cannot walk map {name}"))?;
        for key in keys {
            map.remove(&key).with_context(|| format!("cannot delete from map {name}"))?;
        }
        Ok(())
    }

    /// Packets by verdict, of all CPUs.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn counters(&self) -> Result<Counters> {
        let map = self.ebpf.map(maps::COUNTERS).context("the object has no counters")?;
        let map = PerCpuArray::<_, u64>::try_from(map)?;
        let sum = |index| Ok(map.get(&index, 0)?.iter().sum());
        Ok(Counters::new((0..Reason::COUNT).map(sum).collect::<Result<_>>()?))
    }

    /// Counters of an Egress, of all CPUs.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn egress(&self, index: u32) -> Result<EgressCounters> {
        let map = self.ebpf.map(maps::EGRESS_COUNTERS).context("the object has no Egress counters")?;
        let map = PerCpuArray::<_, EgressCounters>::try_from(map)?;
        Ok(total(map.get(&index, 0)?.iter()))
    }

    /// Takes the events that were sent.
    ///
    /// # Errors
    ///
    /// When one has another size.
    pub fn take_events(&mut self) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        while let Some(item) = self.events.next() {
            let event = Event::read_from_bytes(&item).ok().context("an event of another size")?;
            events.push(event);
        }
        Ok(events)
    }
}
