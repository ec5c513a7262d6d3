//! Jobs with `invoke`: ends them once everything that they started has ended, and what they started once they have been cancelled.

use std::collections::BTreeMap;
use std::sync::Arc;

use kici_engine::invoke::{Child, Started, Verdict, judge};
use kici_engine::state::FailureReason;
use kici_store::model::{GateVerdict, OpenGate};

use crate::dispatcher::{DispatchError, Dispatcher};

/// Jobs handled in one activation.
const BATCH: u32 = 200;

impl Dispatcher {
    /// Looks at the jobs that wait as soon as there is news.
    pub(crate) async fn watch_gates(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.stopping.cancelled() => return,
                () = self.gates.notified() => {}
            }
            if let Err(error) = self.settle_gates().await {
                tracing::warn!(%error, "jobs that wait for other workflows could not be settled");
            }
        }
    }

    /// Settles jobs that wait for what they started. Returns how many.
    pub(crate) async fn settle_gates(self: &Arc<Self>) -> Result<u64, DispatchError> {
        let gates = self.store.gates_open(BATCH).await?;
        let mut done = 0;
        for gate in &gates {
            // One that cannot be settled keeps no other waiting.
            match self.settle_gate(gate).await {
                Ok(settled) => done += u64::from(settled),
                Err(error) => tracing::warn!(job = %gate.job_id, %error, "a job that waits cannot be settled yet"),
            }
        }
        Ok(done)
    }

    async fn settle_gate(self: &Arc<Self>, gate: &OpenGate) -> Result<bool, DispatchError> {
        if gate.status.is_terminal() {
            // Its event must be delivered first: what it starts is not known before.
            let open = self.end_started(gate, "the job that started it has ended").await?;
            if !gate.delivered || open {
                return Ok(false);
            }
            return self.end_gate(gate, GateVerdict::Ended).await;
        }
        if let (Some(since), Some(limit)) = (gate.started_at, gate.timeout)
            && since.plus(limit) < self.clock.now()
        {
            self.end_started(gate, "the job that started it waited longer than its limit").await?;
            let message = format!("what it started did not end within {} s", limit.as_secs());
            return self.end_gate(gate, GateVerdict::Failed { reason: FailureReason::JobTimeout, message }).await;
        }
        let Some(run) = self.store.run_get(gate.run_id).await? else { return Ok(false) };
        let ids: Vec<String> = gate.runs.iter().map(|run| run.id.to_string()).collect();
        let named = gate.runs.iter().zip(&ids);
        let runs: Vec<Child<'_>> =
            named.map(|(run, id)| Child { id, workflow: &run.workflow_name, status: run.status }).collect();
        let started = Started {
            event: &gate.event_name,
            repo: &run.repo,
            delivered: gate.delivered,
            refused: gate.refused.as_deref(),
            optional: gate.optional,
            runs: &runs,
        };
        match judge(&started) {
            Verdict::Wait(note) => {
                self.store.gate_note(gate.run_id, gate.job_id, note).await?;
                Ok(false)
            }
            Verdict::Success => {
                let outputs = BTreeMap::from([("runs".to_owned(), ids.join(" "))]);
                self.end_gate(gate, GateVerdict::Success { outputs }).await
            }
            Verdict::Fail(reason, message) => self.end_gate(gate, GateVerdict::Failed { reason, message }).await,
        }
    }

    /// Cancels what a job started. True while something of it has not ended.
    async fn end_started(self: &Arc<Self>, gate: &OpenGate, why: &str) -> Result<bool, DispatchError> {
        let mut open = false;
        for run in gate.runs.iter().filter(|run| !run.status.is_terminal()) {
            open = true;
            let by = format!("{} ({why})", gate.job_id);
            match self.cancel_run(run.id, &by, FailureReason::CancelledByUser, false).await {
                Ok(_) | Err(DispatchError::AlreadyTerminal(_) | DispatchError::NoSuchRun) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(open)
    }

    async fn end_gate(self: &Arc<Self>, gate: &OpenGate, verdict: GateVerdict) -> Result<bool, DispatchError> {
        if let Some(effects) = self.store.gate_settle(gate.run_id, gate.job_id, verdict, self.activate()).await? {
            self.apply_effects(&effects);
        }
        Ok(true)
    }
}
