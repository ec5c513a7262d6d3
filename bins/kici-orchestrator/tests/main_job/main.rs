//! The main job with real processes: a webhook goes in, steps run at an agent, logs and results come out, and none of it is
//! lost when a process dies.

mod crash;
mod happy;
mod intake;
mod stack;
