#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod compile;
pub mod condition;
pub mod diagnostic;
pub mod duration;
pub mod event;
pub mod expr;
pub mod ids;
pub mod inputs;
pub mod jobspec;
pub mod labels;
pub mod lock;
pub mod lockfile;
pub mod matrix;
pub mod metrics;
pub mod needs;
pub mod pattern;
pub mod plan;
pub mod repository;
pub mod schema;
pub mod size;
pub mod state;
pub mod time;
pub mod trigger;
pub mod yaml;
