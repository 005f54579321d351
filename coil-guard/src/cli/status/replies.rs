//! Symmetric replies of mode rewrite.

use serde_json::{Value, json};

use super::{
    Status,
    egress::{Clients, Egress},
};
use crate::{datapath::PodSnapshot, plan::Mode};

/// How it is with the replies of one Egress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replies {
    /// Each comes from a port of its own, and cannot be made symmetric.
    PortEach,
    Counted {
        /// Clients with a flow, where that is known.
        clients: Option<usize>,
        /// Of these, or of all attached pods where it is not known, those whose replies are turned back.
        returning: usize,
        /// Egress pods of this node that send replies to the port that a client's packets come from.
        answering: usize,
    },
}

/// `None` in other modes: there replies are symmetric by themselves.
pub(super) fn replies(status: &Status, egress: &Egress<'_>) -> Option<Replies> {
    let service = egress.services.values().find(|service| service.mode == Mode::Rewrite)?;
    if service.sport_auto {
        return Some(Replies::PortEach);
    }
    let replies = &status.snapshot.replies;
    let (clients, returning) = match &egress.clients {
        Clients::Known(names) => {
            let named = |pod: &&PodSnapshot| names.iter().any(|name| *name == pod.name);
            (Some(names.len()), replies.clients.values().filter(named).count())
        }
        Clients::PortEach | Clients::Unknown => (None, replies.clients.len()),
    };
    let is_backend =
        |pod: &&PodSnapshot| pod.addresses.iter().any(|address| egress.backends.contains_key(address));
    let answering = replies.egress_pods.values().filter(is_backend).count();
    Some(Replies::Counted { clients, returning, answering })
}

pub(super) fn text(replies: Replies) -> String {
    match replies {
        Replies::PortEach => "asymmetric: with fouSourcePortAuto each comes from a port of its own".into(),
        Replies::Counted { clients, returning, answering } => {
            let of = clients.map_or_else(String::new, |clients| format!(" of {clients}"));
            format!(
                "turned back for {returning}{of} clients, so they are symmetric from each egress pod whose node is guarded \
                 ({answering} here)"
            )
        }
    }
}

pub(super) fn json(replies: Replies) -> Value {
    match replies {
        Replies::PortEach => json!({"symmetric": false}),
        Replies::Counted { clients, returning, answering } => json!({
            "symmetric": clients.is_none_or(|clients| clients == returning),
            "clients": clients, "returning": returning, "answeringHere": answering,
        }),
    }
}

pub(super) fn problem(status: &Status, egress: &Egress<'_>) -> Option<String> {
    match replies(status, egress)? {
        Replies::Counted { clients: Some(clients), returning, .. } if returning < clients => Some(format!(
            "Egress {}: replies to {} of {clients} clients cannot be turned back, so that they are asymmetric where a flow has \
             left a backend, and an ingress NetworkPolicy of the client drops them: the agent attaches within seconds, or says \
             in its log why it cannot",
            egress.title(),
            clients - returning
        )),
        _ => None,
    }
}
