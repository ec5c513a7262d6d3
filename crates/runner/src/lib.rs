//! What an agent does with a job: it holds a session with the orchestrator, checks the commit out, runs the steps, masks and
//! keeps their output, and reports results that must not get lost.
//!
//! [`steps`] is usable by itself, without a session.

#![forbid(unsafe_code)]

pub mod agent;
pub mod archive;
pub mod checkout;
mod claim;
pub mod config;
pub mod confine;
pub mod container;
pub mod credentials;
pub mod doctor;
pub mod emit;
mod generated;
pub mod hash_files;
pub mod job;
pub mod journal;
pub mod key;
pub mod lines;
pub mod local;
pub mod mask;
pub mod outbox;
pub mod ports;
pub mod session;
pub mod spool;
pub mod stash;
pub mod steps;
pub mod stop;
mod unary;
pub mod upload;
