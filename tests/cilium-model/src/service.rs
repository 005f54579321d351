//! Service lookup and backend selection, per packet.

use aya_ebpf::{bindings::BPF_ANY, helpers::generated::bpf_get_prandom_u32};
use coil_guard_common::cilium::{
    Affinity, AffinityMatchKey, CT_SERVICE, CtEntry, SERVICE_FLAG_AFFINITY, Service,
};

use crate::{
    abi::{Settings, Stat},
    conntrack::{now, refresh_service, service_entry},
    family::{Family, Scratch},
    maps::{AFFINITY_MATCH, count},
    packet::{Packet, UDP},
};

/// Keys have protocol 17 from 1.17 on; protocol 0 (any) is looked up there too.
#[inline(always)]
pub fn lookup<F: Family>(
    settings: &Settings,
    address: &F::Address,
    port: [u8; 2],
) -> Option<(&'static Service, u8)> {
    if settings.minor >= 17
        && let Some(service) = F::service(address, port, 0, UDP)
    {
        return Some((service, UDP));
    }
    F::service(address, port, 0, 0).map(|service| (service, 0))
}

/// A backend for the packet, or `None` when it is to be dropped.
#[inline(always)]
pub fn balance<F: Family>(
    scratch: &mut Scratch<F>,
    settings: &Settings,
    service: &Service,
    protocol: u8,
    length: u64,
) -> Option<(&'static F::Address, [u8; 2])> {
    if settings.early_count_check != 0 && service.count == 0 {
        return None;
    }
    let Scratch { packet, key, entry } = scratch;
    let packet = &*packet;
    // Ports stand in the order of the packet's bytes: the source port in the field of the destination port.
    let ports = [packet.source_port, packet.destination_port];
    F::set_key(key, &packet.destination, &packet.source, ports, UDP, CT_SERVICE);
    let found = F::ct().get_ptr_mut(&*key);
    let usable = found.filter(|entry| {
        // SAFETY: a live map value.
        let rev_nat_index = unsafe { (**entry).rev_nat_index };
        // Up to 1.15 an entry of another service is found and corrected below.
        settings.minor <= 15 || rev_nat_index == service.rev_nat_index
    });
    let (id, backend) = match usable {
        Some(found) => {
            refresh_service(found, settings, length);
            established::<F>(settings, packet, service, protocol, found)?
        }
        None => {
            count(Stat::NewService);
            if service.count == 0 {
                return None;
            }
            let chosen = choose::<F>(settings, packet, service, protocol, true)?;
            service_entry(entry, settings, chosen.0, service.rev_nat_index, length);
            let _ = F::ct().insert(&*key, &*entry, BPF_ANY.into());
            chosen
        }
    };
    if service.flags & SERVICE_FLAG_AFFINITY != 0 {
        // Every packet takes the client's affinity along, whatever the state of its backend.
        let affinity = Affinity { last_used: now().into(), backend_id: id, pad: 0 };
        let key = F::affinity_key(&packet.source, service.rev_nat_index);
        let _ = F::affinity().insert(key, affinity, BPF_ANY.into());
    }
    Some(backend)
}

/// Id of the chosen backend, its address and port.
type Chosen<F> = (u32, (&'static <F as Family>::Address, [u8; 2]));

/// UDP has no SYN, so that a backend which exists is kept in every state.
#[inline(always)]
fn established<F: Family>(
    settings: &Settings,
    packet: &Packet<F::Address>,
    service: &Service,
    protocol: u8,
    entry: *mut CtEntry,
) -> Option<Chosen<F>> {
    // SAFETY: a live map value.
    let (id, rev_nat_index) =
        unsafe { ((&raw const (*entry).backend_id).read_volatile() as u32, (*entry).rev_nat_index) };
    let other_service = rev_nat_index != service.rev_nat_index;
    if !other_service && let Some(backend) = F::backend(id) {
        return Some((id, backend));
    }
    count(Stat::Reselected);
    if service.count == 0 {
        return None;
    }
    let chosen = choose::<F>(settings, packet, service, protocol, other_service)?;
    // SAFETY: a live map value; aligned stores.
    unsafe {
        (&raw mut (*entry).backend_id).write_volatile(chosen.0.into());
        (*entry).rev_nat_index = service.rev_nat_index;
    }
    Some(chosen)
}

#[inline(always)]
fn choose<F: Family>(
    settings: &Settings,
    packet: &Packet<F::Address>,
    service: &Service,
    protocol: u8,
    by_affinity: bool,
) -> Option<Chosen<F>> {
    if by_affinity
        && service.flags & SERVICE_FLAG_AFFINITY != 0
        && let Some(id) = from_affinity::<F>(&packet.source, service)
        && let Some(backend) = F::backend(id)
    {
        count(Stat::FromAffinity);
        return Some((id, backend));
    }
    let number = match settings.pick {
        // SAFETY: no preconditions.
        0 => unsafe { bpf_get_prandom_u32() },
        pick => pick - 1,
    };
    let slot = number.checked_rem(service.count.into())? + 1;
    let id = F::service(&packet.destination, packet.destination_port, slot as u16, protocol)?.word;
    Some((id, F::backend(id)?))
}

/// The client's affinity, unless it timed out or its backend has no match entry. The backend's state is not looked at.
#[inline(always)]
fn from_affinity<F: Family>(client: &F::Address, service: &Service) -> Option<u32> {
    let key = F::affinity_key(client, service.rev_nat_index);
    let affinity = F::affinity().get_ptr_mut(&key)?;
    // SAFETY: a live map value.
    let Affinity { last_used, backend_id, .. } = unsafe { *affinity };
    let timeout = u64::from(service.word & 0x00ff_ffff);
    let now = u64::from(now());
    let matching = AffinityMatchKey { backend_id, rev_nat_index: service.rev_nat_index, pad: [0; 2] };
    if last_used + timeout <= now || AFFINITY_MATCH.get_ptr(matching).is_none() {
        let _ = F::affinity().remove(&key);
        return None;
    }
    // SAFETY: a live map value; an aligned store.
    unsafe { (&raw mut (*affinity).last_used).write_volatile(now) };
    Some(backend_id)
}
