//! The first process of a job's container: the program, the frames that it speaks and the archives that it makes. It is a program of its own, built
//! statically by this crate's build script from `crates/sys/init`.

#[path = "../init/tar.rs"]
pub mod tar;
#[path = "../init/wire.rs"]
pub mod wire;

/// The program; empty where the target is not Linux.
pub static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kici-init"));
