//! The pure core of KiCI: workflow model, compiler, expressions, triggers, needs graph, state machine, labels and the
//! metric catalogue.
//!
//! Invariants, by absence: no I/O, no clock, no randomness, no async runtime. Everything here is a function of its
//! arguments, so it can be tested with tables and properties and used by integrators as a library.

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
pub mod size;
pub mod state;
pub mod time;
pub mod trigger;
pub mod yaml;
