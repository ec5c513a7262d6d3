//! The store on both databases, through its facade.

mod cancel;
mod concurrency;
mod credentials;
mod fixtures;
mod fleet;
mod inbox;
mod lifecycle;
mod queue;
mod retention;
mod stored;
mod turns;
