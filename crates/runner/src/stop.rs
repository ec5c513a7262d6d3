//! Why a job has to end before its steps are through.

use std::time::Duration;

use kici_engine::state::FailureReason;
use tokio::sync::watch;

/// What a job was told. It only ever gets stronger: `Run` < `Graceful` < `Force` < `Abandon`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nothing: go on.
    Run,
    /// SIGTERM to the step, SIGKILL to its tree after `grace`.
    Graceful {
        /// Why.
        reason: FailureReason,
        /// In words.
        message: String,
        /// From SIGTERM to SIGKILL.
        grace: Duration,
        /// Steps that ask to run after a cancel do so.
        more_steps: bool,
    },
    /// SIGKILL to the tree at once, no further step.
    Force {
        /// Why.
        reason: FailureReason,
        /// In words.
        message: String,
    },
    /// The job is somebody else's now: end it as a lost lease asks (SIGTERM, SIGKILL after `grace`), run nothing more and
    /// report nothing.
    Abandon {
        /// From SIGTERM to SIGKILL.
        grace: Duration,
    },
}

impl Stop {
    const fn rank(&self) -> u8 {
        match self {
            Self::Run => 0,
            Self::Graceful { .. } => 1,
            Self::Force { .. } => 2,
            Self::Abandon { .. } => 3,
        }
    }

    /// Whether no step and no hook may be started any more, whatever it asks for.
    pub const fn runs_nothing_more(&self) -> bool {
        matches!(self, Self::Force { .. } | Self::Abandon { .. } | Self::Graceful { more_steps: false, .. })
    }

    /// From SIGTERM to SIGKILL; zero where there is no SIGTERM.
    pub const fn grace(&self) -> Duration {
        match self {
            Self::Graceful { grace, .. } | Self::Abandon { grace } => *grace,
            Self::Run | Self::Force { .. } => Duration::ZERO,
        }
    }
}

/// Tells a job to stop, unless it was told something stronger.
pub fn strengthen(to: &watch::Sender<Stop>, stop: Stop) {
    to.send_if_modified(|now| {
        let stronger = stop.rank() > now.rank();
        if stronger {
            *now = stop;
        }
        stronger
    });
}

/// Waits until a job is told to stop. Never returns when nobody can tell it any more.
pub async fn stopped(from: &mut watch::Receiver<Stop>) -> Stop {
    let told = from.wait_for(|stop| *stop != Stop::Run).await.map(|stop| stop.clone());
    match told {
        Ok(stop) => stop,
        Err(_) => std::future::pending().await,
    }
}
