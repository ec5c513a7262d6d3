#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod broker;
pub mod client;
pub mod grants;
pub mod helper;
pub mod permission;
pub mod protocol;
pub mod repository;
pub mod server;
pub mod service;
pub mod window;
pub mod wire;
