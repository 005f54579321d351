//! The Internet checksum (RFC 1071).

use std::net::IpAddr;

/// One's complement sum of 16-bit words, folded; an odd byte counts as the high half of a word.
#[must_use]
pub fn sum(parts: &[&[u8]]) -> u16 {
    let mut total: u64 = 0;
    for part in parts {
        let mut words = part.chunks_exact(2);
        total += words.by_ref().map(|word| u64::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u64>();
        total += words.remainder().first().map_or(0, |last| u64::from(*last) << 8);
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

/// Sum of the pseudo header of a transport header.
#[must_use]
pub fn pseudo_header(source: IpAddr, destination: IpAddr, protocol: u8, length: usize) -> u16 {
    let length = (length as u32).to_be_bytes();
    let protocol = [0, protocol];
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            sum(&[&source.octets(), &destination.octets(), &protocol, &length])
        }
        _ => sum(&[&octets(source), &octets(destination), &protocol, &length]),
    }
}

/// Checksum of a transport header and its payload whose checksum field is zero. For UDP, 0 has to be sent as 0xffff.
#[must_use]
pub fn transport(source: IpAddr, destination: IpAddr, protocol: u8, segment: &[u8]) -> u16 {
    let pseudo = pseudo_header(source, destination, protocol, segment.len()).to_be_bytes();
    !sum(&[&pseudo, segment])
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_with_its_checksum_sums_to_all_ones() {
        // The example of RFC 1071, section 3.
        assert_eq!(sum(&[&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]]), 0xddf2);
        let mut segment = [0x15, 0xb3, 0x15, 0xb3, 0, 9, 0, 0, 0x41];
        let (source, destination) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let checksum = transport(source, destination, 17, &segment);
        segment[6..8].copy_from_slice(&checksum.to_be_bytes());
        assert_eq!(transport(source, destination, 17, &segment), 0);
    }
}
