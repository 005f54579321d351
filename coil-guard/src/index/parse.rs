//! The edge: API objects in, the index's own structs out. Nothing behind it looks at an API type again.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;

use super::{
    annotations,
    api::{ApiConditions, ApiEgress, ApiPod, ApiPodSpec, ApiService, ApiSlice, Metadata},
    objects::{Egress, EgressPod, Endpoint, LocalPod, ObjectName, Service, Slice},
};

/// The label that says to which Service a slice belongs.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// The container of an egress pod that forwards.
const EGRESS_CONTAINER: &str = "egress";
/// What the API server fills in when a pod spec names none.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// An object that cannot be used as it is. It is skipped, and what was known of it before stays.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {namespace}/{name} is skipped: {field}: {problem}")]
pub struct Malformed {
    /// Kind of the object.
    pub kind: &'static str,
    /// Its namespace, or empty.
    pub namespace: String,
    /// Its name, or empty.
    pub name: String,
    /// The field at fault.
    pub field: String,
    /// What was expected and what was found.
    pub problem: String,
}

struct Subject<'a> {
    kind: &'static str,
    metadata: &'a Metadata,
}

impl Subject<'_> {
    fn malformed(&self, field: impl Into<String>, problem: impl Into<String>) -> Malformed {
        Malformed {
            kind: self.kind,
            namespace: self.metadata.namespace.clone().unwrap_or_default(),
            name: self.metadata.name.clone().unwrap_or_default(),
            field: field.into(),
            problem: problem.into(),
        }
    }

    fn name(&self) -> Result<ObjectName, Malformed> {
        Ok(ObjectName {
            namespace: self.required("metadata.namespace", self.metadata.namespace.as_deref())?.into(),
            name: self.required("metadata.name", self.metadata.name.as_deref())?.into(),
        })
    }

    fn uid(&self) -> Result<&str, Malformed> {
        self.required("metadata.uid", self.metadata.uid.as_deref())
    }

    fn required<'b>(&self, field: &str, value: Option<&'b str>) -> Result<&'b str, Malformed> {
        value
            .filter(|value| !value.is_empty())
            .ok_or_else(|| self.malformed(field, "a value is expected, there is none"))
    }

    fn address(&self, field: impl Fn() -> String, text: &str) -> Result<IpAddr, Malformed> {
        text.parse()
            .map_err(|_| self.malformed(field(), format!("an IP address is expected, found {text:?}")))
    }

    fn pod_addresses(&self, pod: &ApiPod) -> Result<BTreeSet<IpAddr>, Malformed> {
        let Some(status) = &pod.status else { return Ok(BTreeSet::new()) };
        let listed = status.pod_ips.iter().flatten().filter_map(|ip| ip.ip.as_deref());
        // podIPs repeats podIP; only the latter may be there on objects written by other tools.
        let texts = listed.chain(status.pod_ip.as_deref()).filter(|text| !text.is_empty());
        texts.map(|text| self.address(|| "status.podIPs".into(), text)).collect()
    }
}

/// Reads an Egress.
///
/// # Errors
///
/// A field that it cannot do without is missing.
pub fn egress(object: &ApiEgress) -> Result<(ObjectName, Egress), Malformed> {
    let subject = Subject { kind: "Egress", metadata: &object.metadata };
    let spec = object.spec.template.as_ref().and_then(|template| template.spec.as_ref());
    let mut egress = Egress {
        uid: object.metadata.uid.clone().unwrap_or_default(),
        sport_auto: object.spec.fou_source_port_auto.unwrap_or(false),
        pre_stop: spec.is_some_and(has_pre_stop),
        grace: spec.and_then(|spec| spec.termination_grace_period_seconds).map(seconds),
        ..Egress::default()
    };
    annotations::read_egress(object.metadata.annotations.as_ref().unwrap_or(&BTreeMap::new()), &mut egress);
    Ok((subject.name()?, egress))
}

fn has_pre_stop(spec: &ApiPodSpec) -> bool {
    spec.containers.iter().flatten().any(|container| {
        container.name.as_deref() == Some(EGRESS_CONTAINER)
            && container.lifecycle.as_ref().is_some_and(|lifecycle| lifecycle.pre_stop.is_some())
    })
}

fn seconds(seconds: i64) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// Reads a Service.
///
/// # Errors
///
/// A field that it cannot do without is missing or wrong, or the FoU port is not among its UDP ports.
pub fn service(object: &ApiService, fou_port: u16) -> Result<(ObjectName, Service), Malformed> {
    let subject = Subject { kind: "Service", metadata: &object.metadata };
    let spec = object
        .spec
        .as_ref()
        .ok_or_else(|| subject.malformed("spec", "a value is expected, there is none"))?;
    let texts = spec.cluster_ips.iter().flatten().chain(spec.cluster_ip.as_ref());
    let cluster_ips = texts
        .filter(|text| !text.is_empty() && *text != "None")
        .map(|text| subject.address(|| "spec.clusterIPs".into(), text))
        .collect::<Result<BTreeSet<_>, _>>()?;
    let udp = spec.ports.iter().flatten().filter(|port| port.protocol.as_deref() == Some("UDP"));
    let ports: Vec<i32> = udp.filter_map(|port| port.port).collect();
    if !ports.contains(&i32::from(fou_port)) {
        let problem = format!(
            "UDP port {fou_port} is expected, found UDP ports {ports:?}; --fou-port must be the port that coild and \
             coil-egress use"
        );
        return Err(subject.malformed("spec.ports", problem));
    }
    Ok((subject.name()?, Service { cluster_ips }))
}

/// Reads an EndpointSlice.
///
/// # Errors
///
/// A field that it cannot do without is missing or wrong.
pub fn slice(object: &ApiSlice, fou_port: u16) -> Result<(ObjectName, Slice), Malformed> {
    let subject = Subject { kind: "EndpointSlice", metadata: &object.metadata };
    let name = subject.name()?;
    let label = object.metadata.labels.as_ref().and_then(|labels| labels.service.as_deref());
    let service = subject.required(&format!("metadata.labels[{SERVICE_LABEL}]"), label)?;
    let service = ObjectName { namespace: name.namespace.clone(), name: service.into() };
    let serves_fou = object
        .ports
        .iter()
        .flatten()
        .any(|port| port.protocol.as_deref() == Some("UDP") && port.port == Some(i32::from(fou_port)));
    let mut endpoints = Vec::new();
    if serves_fou {
        let listed = object.endpoints.as_deref().unwrap_or_default();
        endpoints.reserve_exact(listed.len());
        for (index, endpoint) in listed.iter().enumerate() {
            let address = |text: &String| subject.address(|| format!("endpoints[{index}].addresses"), text);
            let conditions = endpoint.conditions.as_ref();
            let condition = |get: fn(&ApiConditions) -> Option<bool>| conditions.and_then(get);
            // Unset means true for ready and, to Cilium, "as ready" for serving.
            let ready = condition(|conditions| conditions.ready).unwrap_or(true);
            let target = endpoint.target_ref.as_ref();
            endpoints.push(Endpoint {
                addresses: endpoint.addresses.iter().flatten().map(address).collect::<Result<_, _>>()?,
                pod: target
                    .filter(|target| target.kind.as_deref() == Some("Pod"))
                    .and_then(|target| target.uid.as_deref())
                    .filter(|uid| !uid.is_empty())
                    .map(Into::into),
                ready,
                serving: condition(|conditions| conditions.serving).unwrap_or(ready),
                terminating: condition(|conditions| conditions.terminating).unwrap_or(false),
            });
        }
    }
    Ok((name, Slice { service, endpoints }))
}

fn is_finished(pod: &ApiPod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Reads an egress pod.
///
/// # Errors
///
/// A field that it cannot do without is missing or wrong.
pub fn egress_pod(object: &ApiPod) -> Result<(ObjectName, EgressPod), Malformed> {
    let subject = Subject { kind: "Pod", metadata: &object.metadata };
    let name = subject.name()?;
    let instance = object.metadata.labels.as_ref().and_then(|labels| labels.instance.as_deref());
    let conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let of_deletion = object.metadata.deletion_grace_period_seconds;
    let of_spec = object.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let pod = EgressPod {
        uid: subject.uid()?.into(),
        egress: instance
            .map(|instance| ObjectName { namespace: name.namespace.clone(), name: instance.into() }),
        addresses: subject.pod_addresses(object)?.into_iter().collect(),
        finished: is_finished(object),
        ready: conditions.into_iter().any(|condition| {
            condition.kind.as_deref() == Some("Ready") && condition.status.as_deref() == Some("True")
        }),
        deleting: object.metadata.deletion_timestamp.is_some(),
        grace: of_deletion.or(of_spec).map_or(DEFAULT_GRACE, seconds),
    };
    Ok((name, pod))
}

/// Reads a pod of this node; `None` when it is on the host's network, which Coil never makes a client.
///
/// # Errors
///
/// A field that it cannot do without is missing or wrong.
pub fn local_pod(object: &ApiPod) -> Result<(ObjectName, Option<LocalPod>), Malformed> {
    let subject = Subject { kind: "Pod", metadata: &object.metadata };
    let name = subject.name()?;
    if object.spec.as_ref().and_then(|spec| spec.host_network) == Some(true) {
        return Ok((name, None));
    }
    let created = object.metadata.creation_timestamp.as_deref().map(|text| {
        text.parse::<Timestamp>().map_err(|_| {
            subject.malformed("metadata.creationTimestamp", format!("a time is expected, found {text:?}"))
        })
    });
    let pod = LocalPod {
        uid: subject.uid()?.to_owned(),
        addresses: subject.pod_addresses(object)?,
        finished: is_finished(object),
        deleting: object.metadata.deletion_timestamp.is_some(),
        created: created.transpose()?.map_or(0, Timestamp::as_second),
        egresses: annotations::read_client(object.metadata.annotations.as_ref().unwrap_or(&BTreeMap::new())),
    };
    Ok((name, Some(pod)))
}
