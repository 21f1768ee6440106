//! Devices and their kernels.
pub mod cpu;
