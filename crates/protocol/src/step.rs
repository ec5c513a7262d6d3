//! The text form of a step's key and its place among the steps of its job.

use crate::agent::StepKey;

impl StepKey {
    /// `kind-owner-ordinal`, with `_` for the `:` of hooks: the key in the database and the name of the step's log file.
    pub fn text(&self) -> String {
        format!("{}-{}-{}", self.kind.replace(':', "_"), self.owner_index, self.ordinal)
    }

    /// Sorts the steps of a job as they run: what prepares it, its steps each with their hooks, its own hooks.
    pub fn place(&self) -> u32 {
        const STEPS: u32 = 200;
        const HOOKS: u32 = 16;
        const PER_STEP: u32 = 4 * HOOKS;
        const JOB_HOOKS: u32 = 3_000_000_000;
        // Steps of one place are sorted by their text.
        let within = match self.kind.as_str() {
            "hook:before_step" => self.ordinal.min(HOOKS - 1),
            "cache:restore" => HOOKS,
            "cache:save" => HOOKS + 2,
            kind if kind.starts_with("hook:") => (HOOKS + 3).saturating_add(self.ordinal).min(PER_STEP - 1),
            _ => HOOKS + 1,
        };
        // The caches of the commands of `init` are counted by hundreds.
        let of_init = (self.ordinal / 100).checked_sub(1).map(|command| STEPS / 2 + 3 * command);
        match (u32::try_from(self.owner_index), self.kind.as_str()) {
            (Ok(owner), _) => STEPS.saturating_add(owner.saturating_mul(PER_STEP)).saturating_add(within),
            (Err(_), "artifact:download") => 5,
            (Err(_), "cache:restore") => of_init.unwrap_or(4).min(STEPS - 1),
            (Err(_), "cache:save") => of_init.map_or(JOB_HOOKS + 10_000, |place| (place + 2).min(STEPS - 1)),
            (Err(_), "init") => (STEPS / 2 + 1).saturating_add(self.ordinal.saturating_sub(10) * 3).min(STEPS - 1),
            (Err(_), "artifact:upload") => JOB_HOOKS - 1,
            (Err(_), kind) if kind.starts_with("hook:") => JOB_HOOKS.saturating_add(self.ordinal),
            (Err(_), _) => self.ordinal.min(3),
        }
    }

    /// True when the kind holds only `[a-z0-9_:]`, 1 to 32 of them, and the owner is -1 or an index: the text form is
    /// then safe as a file name.
    pub fn is_valid(&self) -> bool {
        let legal = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b':');
        (1..=32).contains(&self.kind.len()) && self.kind.bytes().all(legal) && self.owner_index >= -1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(kind: &str, owner_index: i32, ordinal: u32) -> StepKey {
        StepKey { kind: kind.into(), owner_index, ordinal }
    }

    #[test]
    fn steps_sort_as_they_run() {
        let in_order = [
            key("setup", -1, 0),
            key("checkout", -1, 1),
            key("cache:restore", -1, 15),
            key("artifact:download", -1, 0),
            key("cache:restore", -1, 100),
            key("init", -1, 10),
            key("cache:save", -1, 115),
            key("cache:restore", -1, 1600),
            key("init", -1, 25),
            key("cache:save", -1, 1600),
            key("hook:before_step", 0, 15),
            key("cache:restore", 0, 0),
            key("step", 0, 0),
            key("cache:save", 0, 0),
            key("hook:after_step", 0, 0),
            key("step", 1, 0),
            key("step", 60_000, 0),
            key("artifact:upload", -1, 49),
            key("hook:cleanup", -1, 0),
            key("cache:save", -1, 0),
        ];
        assert!(in_order.is_sorted_by_key(StepKey::place));
        assert_eq!(key("hook:on_cancel", -1, 2).text(), "hook_on_cancel--1-2");
    }

    #[test]
    fn a_kind_cannot_leave_its_directory() {
        assert!(key("hook:cleanup", -1, 0).is_valid());
        for bad in [key("../x", 0, 0), key("", 0, 0), key("step", -2, 0), key("Step", 0, 0)] {
            assert!(!bad.is_valid(), "{bad:?}");
        }
    }
}
