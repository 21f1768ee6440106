#![no_main]

#[path = "../bodies/packed.rs"]
mod body;
#[path = "../bodies/digest.rs"]
mod digest;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::run(data));
