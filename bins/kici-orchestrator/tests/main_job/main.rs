//! The main job with real processes: a webhook goes in, steps run at an agent, logs and results come out, and none of it is
//! lost when a process dies.

#[path = "../../../../crates/containers/tests/harness/mod.rs"]
mod engine;

mod bus;
mod chaos;
mod checkout;
mod claims;
mod complaints;
mod contained;
mod crash;
mod disk;
mod dynamic;
mod examples;
mod git_by_hand;
mod git_credentials;
mod git_host;
mod happy;
mod hostile;
mod hosts;
mod intake;
mod invoke;
mod language;
mod large;
mod leader;
mod loss;
mod poison;
mod postgres;
mod scope;
mod sessions;
mod sources;
mod stack;
mod stored;
mod surroundings;
mod turns;
mod verbs;
