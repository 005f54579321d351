//! What each of the crate's programs has: its verdict, its licence, and an end that no path leads to.

/// Both TCX_NEXT and TC_ACT_UNSPEC: whatever runs next decides.
pub(crate) const PASS_ON: i32 = -1;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Unreachable: nothing here indexes, formats or unwraps. The verifier would refuse the loop.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
