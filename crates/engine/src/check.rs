//! Check modes: what the steps of a run may change, and what a step with `check` found.

use crate::state::words;

words! {
    /// What the steps of a run may change.
    CheckMode("check mode") {
        /// Everything runs.
        Apply = "apply",
        /// Only `check` scripts run: nothing is changed, drift is reported.
        Check = "check",
        /// The same, and a job that found drift fails.
        CheckFailOnDrift = "check-fail-on-drift",
    }
}

impl CheckMode {
    /// Whether nothing may be changed.
    pub const fn is_check(self) -> bool {
        !matches!(self, Self::Apply)
    }

    /// Whether everything runs.
    pub const fn is_apply(&self) -> bool {
        matches!(self, Self::Apply)
    }
}

#[allow(clippy::derivable_impls, reason = "the macro that makes the enum marks no variant")]
impl Default for CheckMode {
    fn default() -> Self {
        Self::Apply
    }
}

words! {
    /// What became of a step with `check`, or of a step without in a run that only checks.
    CheckResult("check result") {
        /// Nothing differed.
        InSync = "in_sync",
        /// Something differed and was repaired.
        Applied = "applied",
        /// Something differs; the run may not repair it.
        WouldChange = "would_change",
        /// It has no `check`, so it did not run.
        NoCheck = "no_check",
    }
}
