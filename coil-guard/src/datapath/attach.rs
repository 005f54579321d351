//! Attaching an instance to an interface, replacing it there, taking it away.
//!
//! A TCX link is pinned and can be handled from any namespace. A clsact filter has no link: it stands at a fixed priority
//! and handle, and everything about it is done inside the pod's namespace.

use std::{io, mem, path::Path};

use aya::{
    programs::{
        LinkOrder, ProgramError, SchedClassifier,
        links::{FdLink, Link as _, LinkError, PinnedLink},
        tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle, qdisc_add_clsact},
    },
    sys::SyscallError,
};
use nix::net::if_::if_indextoname;

use super::{
    DatapathError,
    error::chain,
    layout::{file_error, unpin},
    netlink::{Filter, IngressQdisc, Netlink},
    part::Part,
    sys,
};

/// Ahead of every other filter on the hook: one that ends the walk would hide packets from us.
const PRIORITY: u16 = 1;

/// Why an attach operation failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// The kernel has no TCX.
    #[error("this kernel has no TCX (Linux 6.6 and later have it): use --attach auto or clsact")]
    NoTcx,
    /// The pinned link's interface is gone, or somebody detached it.
    #[error("the link's interface is gone")]
    Dead,
    #[error(
        "the interface {interface} has a {found} qdisc where a clsact one is needed: remove it, or use --attach tcx"
    )]
    Qdisc { interface: String, found: String },
    #[error(
        "the interface {interface} has another filter ({found}) at priority {PRIORITY}, handle {handle:#x}: move it away"
    )]
    FilterTaken { interface: String, found: String, handle: u32 },
    #[error("cannot {action}: {}", chain(.source))]
    Program { action: &'static str, source: ProgramError },
    #[error("cannot {action}: {source}")]
    Io { action: &'static str, source: io::Error },
    #[error(transparent)]
    Datapath(#[from] DatapathError),
}

fn program_error(action: &'static str) -> impl FnOnce(ProgramError) -> AttachError {
    move |source| AttachError::Program { action, source }
}

fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> AttachError {
    move |source| AttachError::Io { action, source }
}

fn errno(error: &ProgramError) -> Option<i32> {
    match error {
        ProgramError::SyscallError(SyscallError { io_error, .. }) => io_error.raw_os_error(),
        _ => None,
    }
}

/// Name of an interface of the calling thread's namespace.
pub(crate) fn interface_name(index: u32) -> Result<String, AttachError> {
    let name = if_indextoname(index).map_err(|errno| io_error("find the interface")(errno.into()))?;
    Ok(name.to_string_lossy().into_owned())
}

/// Attaches to the part's hook of the interface, ahead of all others there, and pins the link.
pub(crate) fn attach_tcx(
    program: &mut SchedClassifier,
    part: Part,
    interface: &str,
    pin: &Path,
) -> Result<(), AttachError> {
    let order = TcAttachOptions::TcxOrder(LinkOrder::first());
    let id =
        program.attach_with_options(interface, part.hook(), order).map_err(|error| match errno(&error) {
            Some(libc::EINVAL | libc::EOPNOTSUPP | ENOTSUPP) => AttachError::NoTcx,
            _ => program_error("attach by TCX")(error),
        })?;
    let link = program.take_link(id).map_err(program_error("take the link"))?;
    let link = FdLink::try_from(link).map_err(link_error("take the link"))?;
    link.pin(pin).map_err(|source| DatapathError::Pin { path: pin.to_owned(), source })?;
    Ok(())
}

/// The kernel's own number, which libc does not know.
const ENOTSUPP: i32 = 524;

fn link_error(action: &'static str) -> impl FnOnce(LinkError) -> AttachError {
    move |error| AttachError::Io { action, source: io::Error::other(error) }
}

/// Replaces the program in a pinned link, atomically.
pub(crate) fn replace_tcx(program: &mut SchedClassifier, pin: &Path) -> Result<(), AttachError> {
    let link = match PinnedLink::from_pin(pin) {
        Ok(link) => FdLink::from(link),
        Err(LinkError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::NotFound => {
            return Err(AttachError::Dead);
        }
        Err(error) => return Err(link_error("open the pinned link")(error)),
    };
    let link = SchedClassifierLink::try_from(link).map_err(link_error("open the pinned link"))?;
    let id = program.attach_to_link(link).map_err(|error| match errno(&error) {
        Some(libc::ENOLINK) => AttachError::Dead,
        _ => program_error("replace the program in the link")(error),
    })?;
    // The pin keeps the link; ours would be detached with the instance.
    drop(program.take_link(id).map_err(program_error("take the link"))?);
    Ok(())
}

/// Takes the program away and removes the pin.
pub(crate) fn detach_tcx(pin: &Path) -> Result<(), DatapathError> {
    sys::detach_link(pin).map_err(file_error("detach the link", pin))?;
    unpin(pin)
}

/// Whether a clsact qdisc must be added before a filter can be attached.
pub(crate) fn needs_qdisc(interface: &str, index: u32) -> Result<bool, AttachError> {
    let mut netlink = Netlink::open().map_err(io_error("open a netlink socket"))?;
    match netlink.ingress_qdisc(index).map_err(io_error("list qdiscs"))? {
        IngressQdisc::Clsact => Ok(false),
        IngressQdisc::None => Ok(true),
        IngressQdisc::Other(found) => Err(AttachError::Qdisc { interface: interface.to_owned(), found }),
    }
}

/// Attaches a filter to the part's hook of the interface, adding a qdisc if there is none, or replaces the program of our
/// filter there in place. Says whether there was one.
pub(crate) fn attach_clsact(
    program: &mut SchedClassifier,
    part: Part,
    interface: &str,
    index: u32,
) -> Result<bool, AttachError> {
    if needs_qdisc(interface, index)? {
        add_qdisc(interface)?;
    }
    let mut netlink = Netlink::open().map_err(io_error("open a netlink socket"))?;
    let filters = netlink.filters(index, part.hook()).map_err(io_error("list filters"))?;
    if filters.iter().any(|filter| is_place_of(part, filter) && filter.is_ours()) {
        let id = program
            .attach_to_link(filter_link(part, interface)?)
            .map_err(program_error("replace the filter"))?;
        forget(program, id)?;
        return Ok(true);
    }
    // All filters of one priority are of one kind.
    let in_the_way = |filter: &&Filter| {
        is_place_of(part, filter) || filter.priority == PRIORITY && filter.program.is_none()
    };
    if let Some(filter) = filters.iter().find(in_the_way) {
        let found = filter.program.as_ref().map_or("not a BPF one", |(name, _)| name).to_owned();
        return Err(AttachError::FilterTaken {
            interface: interface.to_owned(),
            found,
            handle: part.handle(),
        });
    }
    let options = NlOptions { priority: PRIORITY, handle: TcHandle::from(part.handle()), classid: None };
    let id = program
        .attach_with_options(interface, part.hook(), TcAttachOptions::Netlink(options))
        .map_err(program_error("attach a clsact filter"))?;
    forget(program, id)?;
    Ok(false)
}

fn add_qdisc(interface: &str) -> Result<(), AttachError> {
    match qdisc_add_clsact(interface) {
        Ok(()) | Err(TcError::AlreadyAttached) => Ok(()),
        Err(error) => Err(io_error("add a clsact qdisc")(io::Error::other(chain(&error)))),
    }
}

fn is_place_of(part: Part, filter: &Filter) -> bool {
    filter.priority == PRIORITY && filter.handle == part.handle()
}

fn filter_link(part: Part, interface: &str) -> Result<SchedClassifierLink, AttachError> {
    SchedClassifierLink::attached(interface, part.hook(), PRIORITY, TcHandle::from(part.handle()), None)
        .map_err(io_error("find the interface"))
}

/// A filter goes with its link object, so that one is leaked on purpose: it is a few integers.
fn forget(
    program: &mut SchedClassifier,
    id: aya::programs::tc::SchedClassifierLinkId,
) -> Result<(), AttachError> {
    mem::forget(program.take_link(id).map_err(program_error("take the link"))?);
    Ok(())
}

/// Id of the program of the part's filter on the interface.
pub(crate) fn clsact_program(part: Part, index: u32) -> Result<Option<u32>, AttachError> {
    let mut netlink = Netlink::open().map_err(io_error("open a netlink socket"))?;
    let filters = netlink.filters(index, part.hook()).map_err(io_error("list filters"))?;
    Ok(filters
        .iter()
        .find(|filter| is_place_of(part, filter) && filter.is_ours())
        .and_then(|filter| filter.program.as_ref().map(|(_, id)| *id)))
}

/// Removes the part's filter, and the qdisc if it was added by us and no filter is left on either hook. Says whether there was a
/// filter.
pub(crate) fn detach_clsact(part: Part, index: u32, remove_qdisc: bool) -> Result<bool, AttachError> {
    let had_filter = clsact_program(part, index)?.is_some();
    if had_filter {
        let interface = interface_name(index)?;
        filter_link(part, &interface)?.detach().map_err(program_error("remove the filter"))?;
    }
    if remove_qdisc {
        let mut netlink = Netlink::open().map_err(io_error("open a netlink socket"))?;
        let is_clsact =
            netlink.ingress_qdisc(index).map_err(io_error("list qdiscs"))? == IngressQdisc::Clsact;
        if is_clsact && !netlink.has_filters(index).map_err(io_error("list filters"))? {
            netlink.delete_clsact(index).map_err(io_error("remove the clsact qdisc"))?;
        }
    }
    Ok(had_filter)
}
