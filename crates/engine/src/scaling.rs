//! Agents on demand: the words between dispatch and whatever starts them, and what one pass over waiting jobs may ask for.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::ids::AgentId;
use crate::labels::AgentType;
use crate::state::words;

/// What the id of every agent that a scaler starts begins with. No other agent may use it: it would have no gate.
pub const AGENT_PREFIX: &str = "scaler-";

/// Waiting jobs that one pass looks at.
pub const MAX_SCANNED: u32 = 500;
/// Agents that one pass has started.
pub const MAX_SPAWNS: u32 = 10;

/// True for the ids of agents that a scaler starts.
pub fn is_scaler_agent(id: &AgentId) -> bool {
    id.as_str().starts_with(AGENT_PREFIX)
}

words! {
    /// The limit that leaves no room for another agent.
    Cap("cap") {
        /// Agents of all pools.
        GlobalMaxAgents = "global_max_agents",
        /// Agents of the pool.
        MaxAgents = "max_agents",
        /// Processors of the pool.
        ResourceCapCpu = "resource_cap_cpu",
        /// Memory of the pool.
        ResourceCapMemory = "resource_cap_memory",
        /// Processors of all pools.
        GlobalCapCpu = "global_cap_cpu",
        /// Memory of all pools.
        GlobalCapMemory = "global_cap_memory",
        /// Processors of the machine, which several orchestrators share.
        MachinePoolCpu = "machine_pool_cpu",
        /// Memory of the machine, which several orchestrators share.
        MachinePoolMemory = "machine_pool_memory",
        /// What the machine has left cannot be told.
        MachinePoolError = "machine_pool_error",
        /// Agents of the pool in the whole cluster.
        ClusterSlot = "cluster_slot",
        /// How many agents the cluster has cannot be told.
        ClusterSlotError = "cluster_slot_error",
    }
}

words! {
    /// What had waiting jobs offered to the scaler again.
    Trigger("trigger") {
        /// Room came free.
        Hook = "hook",
        /// The timer.
        Sweep = "sweep",
    }
}

/// Answer to the wish for an agent for one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case", deny_unknown_fields)]
pub enum ScaleVerdict {
    /// One is being started.
    Spawning {
        /// How.
        backend_type: AgentType,
        /// Its id.
        agent_id: AgentId,
    },
    /// One was being started for this job before; nothing else happens.
    AlreadySpawning {
        /// Its id.
        agent_id: AgentId,
    },
    /// A pool fits, and has no room now.
    AtCapacity {
        /// What is used up.
        cap: Cap,
    },
    /// No pool fits.
    NoBackend {
        /// What the job asks for.
        labels: Vec<String>,
    },
    /// A pool fits, and could not take the job even if it were empty.
    Unsatisfiable {
        /// The limit that the job exceeds.
        cap: Cap,
        /// What the job asks for, in the limit's unit (agents, thousandths of a processor, bytes).
        requested: u64,
        /// The limit.
        max: u64,
    },
    /// The agent could not be started.
    Failed {
        /// Why.
        error: String,
    },
    /// Nothing was tried.
    Skipped {
        /// Why.
        reason: String,
    },
}

impl ScaleVerdict {
    /// The word of this verdict.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Spawning { .. } => "spawning",
            Self::AlreadySpawning { .. } => "already_spawning",
            Self::AtCapacity { .. } => "at_capacity",
            Self::NoBackend { .. } => "no_backend",
            Self::Unsatisfiable { .. } => "unsatisfiable",
            Self::Failed { .. } => "failed",
            Self::Skipped { .. } => "skipped",
        }
    }

    /// What it means for a job that waits, for people; none when the scaler has nothing to do with it.
    pub fn reason(&self) -> Option<String> {
        Some(match self {
            Self::Spawning { backend_type, agent_id } => {
                format!("agent {agent_id} ({backend_type}) is being started for it")
            }
            Self::AlreadySpawning { agent_id } => format!("agent {agent_id} is being started for it"),
            Self::AtCapacity { cap } => format!("a pool could run it and has no room: {cap} is reached"),
            Self::NoBackend { .. } => return None,
            Self::Unsatisfiable { cap, requested, max } => {
                format!("no pool is large enough: it asks for {requested} and {cap} allows {max}")
            }
            Self::Failed { error } => format!("an agent could not be started for it: {error}"),
            Self::Skipped { reason } => format!("no agent is started for it now: {reason}"),
        })
    }
}

/// One pass over waiting jobs, oldest first. It ends once it has started its share, and does not ask again for jobs like one
/// that was turned down: a hundred jobs for a full pool keep none that wants another pool.
#[derive(Debug, Default)]
pub struct Pass {
    spawned: u32,
    turned_down: BTreeSet<String>,
}

impl Pass {
    /// Agents that were started.
    pub const fn spawned(&self) -> u32 {
        self.spawned
    }

    /// True when it may start no more.
    pub const fn is_over(&self) -> bool {
        self.spawned >= MAX_SPAWNS
    }

    /// Whether the scaler is to be asked for a job; `kind` is equal for jobs that ask for the same.
    pub fn asks(&self, kind: &str) -> bool {
        !self.is_over() && !self.turned_down.contains(kind)
    }

    /// Notes the answer.
    pub fn note(&mut self, kind: &str, verdict: &ScaleVerdict) {
        match verdict {
            ScaleVerdict::Spawning { .. } => self.spawned += 1,
            // Of another job of the kind the answer may be another one.
            ScaleVerdict::AlreadySpawning { .. } | ScaleVerdict::Failed { .. } => {}
            ScaleVerdict::AtCapacity { .. }
            | ScaleVerdict::NoBackend { .. }
            | ScaleVerdict::Unsatisfiable { .. }
            | ScaleVerdict::Skipped { .. } => drop(self.turned_down.insert(kind.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests;
