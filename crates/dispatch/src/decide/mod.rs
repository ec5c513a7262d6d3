//! Pure decisions: values in, values out; no clock, no database, no tokio. The code around them reads, calls and writes.

pub mod attempts;
pub mod calls;
pub mod gates;
pub mod pressure;
pub mod rate;
pub mod reconcile;
pub mod settle;
pub mod triage;
pub mod violations;
