//! `cargo xtask dev`.
#![allow(dead_code)]
mod children;
mod hook;
mod labels;
mod repo;
mod report;
mod screen;
