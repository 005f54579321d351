//! The programs for symmetric replies, loaded from the agent's object over maps that nobody else uses.

use std::{
    env, fmt, fs,
    net::{IpAddr, Ipv6Addr},
};

use anyhow::{Context as _, Result, ensure};
use aya::{
    Ebpf, EbpfLoader, Pod, VerifierLogLevel,
    maps::{HashMap, MapData, PerCpuArray, PerCpuValues},
    programs::SchedClassifier,
};
use coil_guard_common::{
    abi::{
        Answer, AnswerKey, BackendMark, PodConfig, Return, ReturnKey, Returning, maps, mark, reply_program,
    },
    counters::ReplyCount,
};

use super::{
    clock::monotonic,
    run::pass,
    scene::{CLIENT_GENERATION, Scene, address_of, mapped, pod_config},
};
use crate::{
    cilium::IpFamily,
    fou::{self, ChecksumKind, Outer, checksum},
    program::{Checksum, udp_offset},
};

/// Path of an object to use in place of the agent's.
const OBJECT_VARIABLE: &str = "COIL_GUARD_REPLIES_OBJECT";

/// Backend id of the scene's egress pod.
pub const EGRESS_POD: u32 = 1;

/// Both ends of a tunnel, in one set of maps.
pub struct Replies {
    egress_pod: Ebpf,
    client: Ebpf,
    /// Instructions that the verifier went through, by program.
    pub verified: Vec<(&'static str, u32)>,
}

impl fmt::Debug for Replies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replies").field("verified", &self.verified).finish_non_exhaustive()
    }
}

impl Replies {
    /// Loads the programs for the scene's egress pod and its client.
    ///
    /// # Errors
    ///
    /// When the agent was built without programs, or the kernel refuses one.
    pub fn load() -> Result<Self> {
        let config = PodConfig {
            address6: octets6(address_of(IpFamily::V6, EGRESS_POD)),
            address4: octets4(address_of(IpFamily::V4, EGRESS_POD)),
            generation: CLIENT_GENERATION + 1,
            ..pod_config()
        };
        let mut verified = Vec::new();
        let egress_pod = load(&config, &[reply_program::LEARN, reply_program::ANSWER], &mut verified)?;
        let client = load(&pod_config(), &[reply_program::RETURN], &mut verified)?;
        Ok(Self { egress_pod, client, verified })
    }

    /// Runs one of the programs on a frame and gives the frame afterwards.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the program returned anything but "next".
    pub fn run(&self, program: &'static str, frame: &[u8]) -> Result<Vec<u8>> {
        let ebpf = if program == reply_program::RETURN { &self.client } else { &self.egress_pod };
        let loaded: &SchedClassifier = ebpf
            .program(program)
            .with_context(|| format!("the object has no program {program}"))?
            .try_into()?;
        pass(loaded, frame)
    }

    /// What the egress pod has learnt of the client.
    ///
    /// # Errors
    ///
    /// When the map has another layout.
    pub fn learnt(&self, family: IpFamily) -> Result<Option<Answer>> {
        let map = self.egress_pod.map(maps::ANSWERS).context("the object has no map of answers")?;
        let map = HashMap::<&MapData, AnswerKey, Answer>::try_from(map)?;
        Ok(map.get(&answer_key(family), 0).ok())
    }

    /// Sets what the egress pod has learnt of the client.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn teach(&mut self, family: IpFamily, port: u16, last_seen: u64) -> Result<()> {
        let answer = Answer { last_seen, port: port.to_be_bytes(), pad: [0; 6] };
        self.teach_key(answer_key(family), answer)
    }

    /// Sets what some egress pod has learnt of some client.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn teach_key(&mut self, key: AnswerKey, answer: Answer) -> Result<()> {
        set(&mut self.egress_pod, maps::ANSWERS, key, answer)
    }

    /// Notes that the client was given `port` for the service.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn give(&mut self, family: IpFamily, port: u16, generation: u32) -> Result<()> {
        let key = ReturnKey { client: mapped(client(family)), port: port.to_be_bytes(), pad: [0; 2] };
        let value = Return { service: mapped(service(family)), generation, pad: 0 };
        set(&mut self.client, maps::RETURNS, key, value)
    }

    /// Marks the egress pod at the client's node.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn mark(&mut self, family: IpFamily) -> Result<()> {
        let value = BackendMark {
            keep_until: 0,
            valid_until: monotonic(),
            since: 1,
            state: mark::LEAVING,
            pad: [0; 3],
            seen_before: 0,
        };
        set(&mut self.client, maps::BACKEND_MARKS, mapped(egress_pod(family)), value)
    }

    /// Packets of a kind, of all CPUs.
    ///
    /// # Errors
    ///
    /// When the map has another layout.
    pub fn count(&self, what: ReplyCount) -> Result<u64> {
        let ebpf = match what {
            ReplyCount::Returned | ReplyCount::NotReturned => &self.client,
            _ => &self.egress_pod,
        };
        let map = ebpf.map(maps::REPLY_COUNTERS).context("the object has no counters")?;
        Ok(PerCpuArray::<_, u64>::try_from(map)?.get(&(what as u32), 0)?.iter().sum())
    }
}

impl Scene {
    /// Says that the replies of a client pod of this generation at the scene's client's address are turned back.
    ///
    /// # Errors
    ///
    /// When the map cannot be written.
    pub fn returning(&mut self, generation: u32) -> Result<()> {
        let client = mapped(self.client());
        self.guard.set(maps::RETURNING, &client, &Returning { generation, pad: 0 })
    }

    /// What a port was given to the client for: address of the service, and generation of the pod.
    ///
    /// # Errors
    ///
    /// When the map has other types.
    pub fn given(&self, port: u16) -> Result<Option<(IpAddr, u32)>> {
        let key = ReturnKey { client: mapped(self.client()), port: port.to_be_bytes(), pad: [0; 2] };
        let given = self.guard.own::<ReturnKey, Return>(maps::RETURNS)?.get(&key, 0).ok();
        Ok(given.map(|given| (Ipv6Addr::from(given.service).to_canonical(), given.generation)))
    }
}

/// Loads cores, for the pod of which their stubs would tell.
fn load(
    config: &PodConfig,
    programs: &[&'static str],
    verified: &mut Vec<(&'static str, u32)>,
) -> Result<Ebpf> {
    let other = env::var_os(OBJECT_VARIABLE).map(fs::read).transpose().context(OBJECT_VARIABLE)?;
    let object = other.as_deref().unwrap_or(coil_guard::datapath::REPLIES_OBJECT);
    ensure!(!object.is_empty(), "this build has no eBPF programs: run `cargo xtask setup`, then build again");
    let mut loader = EbpfLoader::new();
    loader.btf(None).verifier_log_level(VerifierLogLevel::STATS);
    for name in [maps::ANSWERS, maps::RETURNS, maps::BACKEND_MARKS] {
        loader.map_max_entries(name, 4096);
    }
    let mut ebpf = loader.load(object).context("cannot read the object")?;
    let map = ebpf.map_mut(maps::CLIENT).context("the object has no map of the pod")?;
    let mut pod = PerCpuArray::<_, PodConfig>::try_from(map)?;
    let processors = pod.get(&0, 0)?.len();
    pod.set(0, PerCpuValues::try_from(vec![*config; processors])?, 0).context("cannot tell of the pod")?;
    for name in programs {
        let program: &mut SchedClassifier = ebpf
            .program_mut(name)
            .with_context(|| format!("the object has no program {name}"))?
            .try_into()?;
        program.load().with_context(|| format!("the kernel refuses {name}"))?;
        verified.push((name, program.info()?.verified_instruction_count().unwrap_or(0)));
    }
    Ok(ebpf)
}

fn set<K: Pod, V: Pod>(ebpf: &mut Ebpf, name: &str, key: K, value: V) -> Result<()> {
    let map = ebpf.map_mut(name).with_context(|| format!("the object has no map {name}"))?;
    HashMap::<_, K, V>::try_from(map)?
        .insert(key, value, 0)
        .with_context(|| format!("cannot update map {name}"))
}

/// The egress pod.
#[must_use]
pub fn egress_pod(family: IpFamily) -> IpAddr {
    address_of(family, EGRESS_POD)
}

/// The client pod.
#[must_use]
pub fn client(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::V4 => pod_config().address4.into(),
        IpFamily::V6 => pod_config().address6.into(),
    }
}

/// The ClusterIP.
#[must_use]
pub fn service(family: IpFamily) -> IpAddr {
    address_of(family, 96)
}

/// Key of what the egress pod has learnt of the client.
#[must_use]
pub fn answer_key(family: IpFamily) -> AnswerKey {
    AnswerKey { egress_pod: mapped(egress_pod(family)), client: mapped(client(family)) }
}

/// A FoU frame between any two, with its outer checksum in a state.
#[must_use]
pub fn frame_between(
    source: (IpAddr, u16),
    destination: (IpAddr, u16),
    inner: &[u8],
    state: Checksum,
    destination_options: bool,
) -> Vec<u8> {
    let kind = if state == Checksum::Finished { ChecksumKind::Correct } else { ChecksumKind::Zero };
    let outer = Outer { source, destination, checksum: kind, destination_options };
    let mut frame = fou::frame([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], &outer.packet(inner));
    if state == Checksum::Unfinished {
        let at = udp_offset(&frame, inner) + 6;
        let sum = checksum::pseudo_header(source.0, destination.0, 17, inner.len() + 8);
        frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    frame
}

fn octets4(address: IpAddr) -> [u8; 4] {
    match address {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(_) => [0; 4],
    }
}

fn octets6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V6(address) => address.octets(),
        IpAddr::V4(_) => [0; 16],
    }
}
