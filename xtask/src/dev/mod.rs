//! `cargo xtask dev`.
#![allow(dead_code)]
mod children;
mod hook;
mod repo;
