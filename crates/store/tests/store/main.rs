//! The store on both databases, through its facade.

mod cancel;
mod claims;
mod concurrency;
mod credentials;
mod dynamic;
mod fixtures;
mod fleet;
mod inbox;
mod large;
mod lifecycle;
mod queue;
mod retention;
mod stored;
mod turns;
