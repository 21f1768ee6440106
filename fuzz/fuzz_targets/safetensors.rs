#![no_main]

#[path = "../bodies/safetensors.rs"]
mod body;
#[path = "../bodies/views.rs"]
mod views;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::run(data));
