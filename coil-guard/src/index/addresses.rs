//! Addresses of a pod: nearly always one, and kept without anything around it.

use std::{net::IpAddr, ops::Deref};

/// Some addresses, in order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Addresses(Number);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Number {
    One(IpAddr),
    Other(Box<[IpAddr]>),
}

impl Deref for Addresses {
    type Target = [IpAddr];

    fn deref(&self) -> &[IpAddr] {
        match &self.0 {
            Number::One(address) => std::slice::from_ref(address),
            Number::Other(addresses) => addresses,
        }
    }
}

impl FromIterator<IpAddr> for Addresses {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        let addresses: Vec<IpAddr> = addresses.into_iter().collect();
        Self(match addresses[..] {
            [one] => Number::One(one),
            _ => Number::Other(addresses.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_comes_out_as_it_went_in() {
        let all: Vec<IpAddr> = ["10.0.0.1", "fd00::1", "10.0.0.2"].map(|text| text.parse().unwrap()).into();
        for number in 0..=all.len() {
            let addresses: Addresses = all[..number].iter().copied().collect();
            assert_eq!(addresses[..], all[..number]);
        }
        assert!(size_of::<Addresses>() <= 24);
    }
}
