//! The outer UDP checksum when the source port is rewritten.
//!
//! A packet that leaves a pod may carry, in the outer checksum field, 0 (none; Coil's own tunnels), a finished checksum,
//! or the bare pseudo-header sum that whoever finishes the checksum starts from. The kernel's helper cannot tell the
//! second from the third when the packet is GSO or its checksum is partial, because both then refer to the *inner* header.
//! The field itself can: it equals the pseudo-header sum only when it is still to be finished.

/// Ones' complement sum of big-endian 16-bit words, not complemented.
#[derive(Clone, Copy, Debug)]
pub struct Sum(u32);

impl Sum {
    /// The sum of nothing.
    #[inline(always)]
    #[must_use]
    pub const fn new() -> Self {
        Self(0)
    }

    /// Adds a word in network order.
    #[inline(always)]
    #[must_use]
    pub const fn word(self, word: [u8; 2]) -> Self {
        Self(self.0 + u16::from_be_bytes(word) as u32)
    }

    /// Adds an IPv4 address.
    #[inline(always)]
    #[must_use]
    pub const fn address4(self, address: [u8; 4]) -> Self {
        let [a, b, c, d] = address;
        self.word([a, b]).word([c, d])
    }

    /// Adds an IPv6 address.
    #[inline(always)]
    #[must_use]
    pub const fn address6(self, address: [u8; 16]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = address;
        self.address4([a, b, c, d]).address4([e, f, g, h]).address4([i, j, k, l]).address4([m, n, o, p])
    }

    /// Folded to 16 bits. Enough for up to 65,537 words.
    #[inline(always)]
    #[must_use]
    pub const fn fold(self) -> u16 {
        let once = (self.0 & 0xffff) + (self.0 >> 16);
        ((once & 0xffff) + (once >> 16)) as u16
    }
}

impl Default for Sum {
    fn default() -> Self {
        Self::new()
    }
}

/// What the checksum field must hold after the source port changes from `old` to `new`; `None` when it must be left alone.
///
/// `pseudo` is the sum over the outer addresses, protocol 17 and the UDP length. All words in network order.
#[inline(always)]
#[must_use]
pub const fn after_port_change(field: [u8; 2], pseudo: Sum, old: [u8; 2], new: [u8; 2]) -> Option<[u8; 2]> {
    let checksum = u16::from_be_bytes(field);
    if checksum == 0 || checksum == pseudo.fold() {
        return None;
    }
    // RFC 1624, equation 3: HC' = ~(~HC + ~m + m').
    let sum =
        Sum::new().word((!checksum).to_be_bytes()).word((!u16::from_be_bytes(old)).to_be_bytes()).word(new);
    let updated = !sum.fold();
    // 0 would say that there is no checksum; its ones' complement twin says the same number.
    Some(if updated == 0 { 0xffff } else { updated }.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn full(pseudo: Sum, source: [u8; 2], rest: &[[u8; 2]]) -> [u8; 2] {
        let sum = rest.iter().fold(pseudo.word(source), |sum, word| sum.word(*word)).fold();
        let checksum = !sum;
        if checksum == 0 { [0xff; 2] } else { checksum.to_be_bytes() }
    }

    proptest! {
        #[test]
        fn updated_checksum_is_the_one_computed_anew(
            client: [u8; 4], service: [u8; 4], old: [u8; 2], new: [u8; 2], rest in proptest::collection::vec(any::<[u8; 2]>(), 2..200)
        ) {
            let length = (8 + 2 * rest.len() as u16).to_be_bytes();
            let pseudo = Sum::new().address4(client).address4(service).word([0, 17]).word(length);
            let before = full(pseudo, old, &rest);
            prop_assume!(before != pseudo.fold().to_be_bytes());
            let after = after_port_change(before, pseudo, old, new).expect("a finished checksum is updated");
            prop_assert_eq!(after, full(pseudo, new, &rest));
        }

        #[test]
        fn none_and_unfinished_checksums_are_left_alone(client: [u8; 16], service: [u8; 16], length: [u8; 2], old: [u8; 2], new: [u8; 2]) {
            let pseudo = Sum::new().address6(client).address6(service).word([0, 17]).word(length);
            prop_assert_eq!(after_port_change([0, 0], pseudo, old, new), None);
            prop_assert_eq!(after_port_change(pseudo.fold().to_be_bytes(), pseudo, old, new), None);
        }
    }
}
