//! Removing everything of ours from the node.

use std::{collections::BTreeSet, fs, io::ErrorKind};

use super::{
    DatapathError, Options,
    attach::{clsact_program, detach_clsact, detach_tcx},
    layout::{Layout, file_error, lock_existing, remove_tree},
    namespaces::{Namespaces, within_each},
    netlink::Netlink,
    own_maps::open_own,
    part::Part,
    pods::Attacher,
    records::{PODS, Pods},
};

/// What [`cleanup`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleanup {
    /// A line for each thing removed.
    pub removed: Vec<String>,
    /// What could not be removed, and why.
    pub errors: Vec<String>,
}

/// Removes everything of ours from the node: programs, links, filters, qdiscs that we added, maps, directories. A failure
/// does not keep it from the rest.
///
/// # Errors
///
/// When another agent is running ([`DatapathError::Busy`]), or the pin directory cannot be opened.
pub fn cleanup(options: &Options) -> Result<Cleanup, DatapathError> {
    let layout = Layout::new(&options.pin_directory);
    let mut done = Cleanup::default();
    let mut namespaces = Namespaces::new(&options.namespace_directory);
    if options.pin_directory.exists() {
        let lock = lock_existing(&options.pin_directory)?;
        let Some(_lock) = lock else {
            return Err(DatapathError::Busy { path: options.pin_directory.clone() });
        };
        detach_recorded(options, &layout, &mut namespaces, &mut done);
        detach_links(&layout, &mut done);
        detach_filters(&mut namespaces, &mut done);
        remove_pins(&layout, &mut done);
    } else {
        detach_filters(&mut namespaces, &mut done);
    }
    Ok(done)
}

fn detach_recorded(options: &Options, layout: &Layout, namespaces: &mut Namespaces, done: &mut Cleanup) {
    let opened = open_own(layout, PODS).and_then(|map| map.map(Pods::new).transpose());
    let (mut records, known) =
        match opened.and_then(|pods| pods.map(|pods| Ok((pods.load()?, pods))).transpose()) {
            Ok(Some((known, records))) => (records, known),
            Ok(None) => return,
            Err(error) => return done.errors.push(error.to_string()),
        };
    for (key, attached) in known {
        let mut attacher = Attacher {
            options,
            layout,
            namespaces: &mut *namespaces,
            records: &mut records,
            no_tcx: &mut false,
        };
        let what = format!("program {:?} of pod {} ({})", key.part.label(), attached.name, key.uid);
        match attacher.detach(&key, &attached) {
            Ok(()) => done.removed.push(what),
            Err(error) => done.errors.push(format!("{what}: {error}")),
        }
    }
}

/// Links without a record, of an agent that died at the wrong moment.
fn detach_links(layout: &Layout, done: &mut Cleanup) {
    match layout.pinned_links() {
        Ok(keys) => {
            for key in keys {
                match detach_tcx(&layout.link(&key)) {
                    Ok(()) => done.removed.push(format!("link {}", layout.link(&key).display())),
                    Err(error) => done.errors.push(error.to_string()),
                }
            }
        }
        Err(error) => done.errors.push(error.to_string()),
    }
}

/// Filters without a record. They carry our name at our place, so a qdisc that is empty without them goes too.
fn detach_filters(namespaces: &mut Namespaces, done: &mut Cleanup) {
    if let Err(error) = namespaces.scan() {
        // A node without pods has no such directory.
        return done
            .errors
            .extend(fs::exists(namespaces.directory()).unwrap_or(true).then(|| error.to_string()));
    }
    let paths = namespaces.paths().map(|(_, path)| (path.to_owned(), path.to_owned())).collect();
    let found = within_each(paths, |_| {
        let interfaces: BTreeSet<_> = Netlink::open()
            .and_then(|mut netlink| netlink.addresses())
            .map(|addresses| addresses.into_iter().map(|address| address.interface).collect())
            .unwrap_or_default();
        let places = interfaces.into_iter().flat_map(|index| Part::ALL.map(|part| (part, index)));
        places
            .filter(|(part, index)| matches!(clsact_program(*part, *index), Ok(Some(_))))
            .map(|(part, index)| detach_clsact(part, index, true))
            .collect::<Vec<_>>()
    });
    for (path, results) in found {
        for result in results {
            match result {
                Ok(_) => done.removed.push(format!("filter in {}", path.display())),
                Err(error) => done.errors.push(format!("filter in {}: {error}", path.display())),
            }
        }
    }
}

fn remove_pins(layout: &Layout, done: &mut Cleanup) {
    let mut directories = layout.other_versions().unwrap_or_default();
    directories.push(layout.directory().to_owned());
    for directory in directories {
        let mut removed = Vec::new();
        let result = remove_tree(&directory, &mut removed);
        done.removed.extend(removed.iter().map(|path| format!("pin {}", path.display())));
        done.errors.extend(result.err().map(|error| error.to_string()));
    }
    match fs::remove_dir(layout.root()) {
        Ok(()) => done.removed.push(format!("directory {}", layout.root().display())),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => done.errors.push(file_error("remove", layout.root())(error).to_string()),
    }
}
