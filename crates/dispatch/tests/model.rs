//! The decisions under random interleavings: agents, sessions, an orchestrator that crashes, a database that applies the
//! guarded updates, and a clock. Whatever the order, the user code of a job starts at most once, a terminal job never
//! changes, and once the faults stop every job ends.
//!
//! Every schedule follows from its seed; a failure prints it.

use std::collections::{BTreeMap, VecDeque};

use kici_dispatch::decide::reconcile::{Held, reconcile};
use kici_dispatch::decide::triage::{LostJob, Triage, forgotten, recovery_expired, triage};

const SCHEDULES: u64 = 100_000;
const AGENTS: usize = 3;
const JOBS: usize = 4;
const FAULTY_STEPS: usize = 60;
const CALM_STEPS: usize = 2_000;
const ACK_TIMEOUT: u64 = 10;
const WINDOW: u64 = 120;
const FENCE: u64 = WINDOW * 7 / 8;
const BUDGET: u32 = 5;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % sides as u64) as usize
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Pending,
    Dispatched,
    Recovering,
    Ended(&'static str),
}

#[derive(Clone, Debug)]
struct Row {
    status: Status,
    epoch: u32,
    agent: Option<usize>,
    acked: bool,
    started: bool,
    ack_deadline: Option<u64>,
    recovery_deadline: u64,
    undone: u32,
    cancelling: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Down {
    Offer(usize, u32),
    Granted(usize, u32),
    Denied(usize, u32),
    Cancel(usize, u32),
    Acked(usize, u32),
}

#[derive(Clone, Debug, PartialEq)]
enum Up {
    Ack(usize, u32),
    Start(usize, u32),
    Done(usize, u32, &'static str),
}

#[derive(Default, Debug)]
struct Session {
    down: VecDeque<Down>,
    up: VecDeque<Up>,
    tracked: BTreeMap<usize, u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Prepared,
    Running,
}

#[derive(Default, Debug)]
struct Agent {
    jobs: BTreeMap<usize, (u32, Phase)>,
    outbox: BTreeMap<(usize, u32), &'static str>,
    session: Option<Session>,
    cut_at: u64,
}

struct World {
    dice: Dice,
    now: u64,
    rows: Vec<Row>,
    agents: Vec<Agent>,
    starts: Vec<u32>,
}

impl World {
    fn new(seed: u64) -> Self {
        let row = Row {
            status: Status::Pending,
            epoch: 0,
            agent: None,
            acked: false,
            started: false,
            ack_deadline: None,
            recovery_deadline: 0,
            undone: 0,
            cancelling: false,
        };
        Self {
            dice: Dice(seed),
            now: 0,
            rows: vec![row; JOBS],
            agents: (0..AGENTS).map(|_| Agent::default()).collect(),
            starts: vec![0; JOBS],
        }
    }

    // ---- the database: guarded updates ----

    fn end(&mut self, job: usize, outcome: &'static str) {
        assert!(!matches!(self.rows[job].status, Status::Ended(_)), "a terminal job changed");
        self.rows[job].status = Status::Ended(outcome);
    }

    fn requeue(&mut self, job: usize, epoch: u32, guard: impl Fn(&Row) -> bool) -> bool {
        let row = &mut self.rows[job];
        let held = matches!(row.status, Status::Dispatched | Status::Recovering);
        if !held || row.epoch != epoch || row.started || !guard(row) {
            return false;
        }
        row.undone += 1;
        row.agent = None;
        row.acked = false;
        row.ack_deadline = None;
        if row.cancelling {
            self.end(job, "cancelled");
        } else if self.rows[job].undone >= BUDGET {
            self.end(job, "gave_up");
        } else {
            self.rows[job].status = Status::Pending;
        }
        true
    }

    fn carry_out(&mut self, job: usize, epoch: u32, agent: usize, decision: Triage) {
        let row = &mut self.rows[job];
        let held = matches!(row.status, Status::Dispatched | Status::Recovering);
        if !held || row.epoch != epoch || row.agent != Some(agent) {
            return;
        }
        match decision {
            Triage::Requeue => {
                self.requeue(job, epoch, |row| row.agent == Some(agent));
            }
            Triage::Recover => {
                row.status = Status::Recovering;
                row.ack_deadline = None;
                row.recovery_deadline = self.now + WINDOW;
            }
            Triage::Fail(reason) => self.end(job, reason.as_str()),
            Triage::Cancel => self.end(job, "cancelled"),
            Triage::Succeed => unreachable!("no host restarts here"),
        }
    }

    fn lost(row: &Row, acked: bool) -> LostJob {
        LostJob { scaler_managed: false, acked, started: row.started, cancelling: row.cancelling, rebooted: false }
    }

    // ---- the orchestrator ----

    fn claim(&mut self) {
        let Some(job) = self.rows.iter().position(|row| row.status == Status::Pending) else { return };
        let free = |agent: &Agent| agent.session.as_ref().is_some_and(|session| session.tracked.len() < 2);
        let candidates: Vec<usize> = (0..AGENTS).filter(|a| free(&self.agents[*a])).collect();
        if candidates.is_empty() {
            return;
        }
        let agent = candidates[self.dice.roll(candidates.len())];
        let now = self.now;
        let row = &mut self.rows[job];
        row.status = Status::Dispatched;
        row.epoch += 1;
        row.agent = Some(agent);
        row.acked = false;
        row.ack_deadline = Some(now + ACK_TIMEOUT);
        let epoch = row.epoch;
        if let Some(session) = &mut self.agents[agent].session {
            session.tracked.insert(job, epoch);
            session.down.push_back(Down::Offer(job, epoch));
        }
    }

    fn receive(&mut self, agent: usize) {
        let Some(session) = &mut self.agents[agent].session else { return };
        let Some(up) = session.up.pop_front() else { return };
        match up {
            Up::Ack(job, epoch) => {
                let row = &mut self.rows[job];
                if row.status == Status::Dispatched && row.epoch == epoch && row.agent == Some(agent) {
                    row.acked = true;
                    row.ack_deadline = None;
                }
            }
            Up::Start(job, epoch) => {
                let row = &mut self.rows[job];
                let mine = row.status == Status::Dispatched && row.epoch == epoch && row.agent == Some(agent);
                let answer = if mine && (!row.cancelling || row.started) {
                    row.started = true;
                    row.acked = true;
                    row.ack_deadline = None;
                    Down::Granted(job, epoch)
                } else {
                    session.tracked.remove(&job);
                    Down::Denied(job, epoch)
                };
                session.down.push_back(answer);
            }
            Up::Done(job, epoch, outcome) => {
                session.tracked.remove(&job);
                session.down.push_back(Down::Acked(job, epoch));
                let row = &self.rows[job];
                let held = matches!(row.status, Status::Dispatched | Status::Recovering);
                if held && row.epoch == epoch && row.agent == Some(agent) && (outcome != "success" || row.started) {
                    self.end(job, outcome);
                }
            }
        }
    }

    fn cut(&mut self, agent: usize) {
        let Some(session) = self.agents[agent].session.take() else { return };
        self.agents[agent].cut_at = self.now;
        for (job, epoch) in session.tracked {
            let row = &self.rows[job];
            let decision = triage(Self::lost(row, row.acked));
            self.carry_out(job, epoch, agent, decision);
        }
    }

    /// The process dies: no triage runs; its start takes what it had handed out into recovery.
    fn crash(&mut self) {
        for agent in &mut self.agents {
            if agent.session.take().is_some() {
                agent.cut_at = self.now;
            }
        }
        for row in self.rows.iter_mut().filter(|row| row.status == Status::Dispatched) {
            row.status = Status::Recovering;
            row.ack_deadline = None;
            row.recovery_deadline = self.now + WINDOW;
        }
    }

    fn sweep(&mut self) {
        for job in 0..JOBS {
            let (epoch, agent) = (self.rows[job].epoch, self.rows[job].agent);
            let Some(agent) = agent else { continue };
            if self.rows[job].ack_deadline.is_some_and(|deadline| deadline <= self.now)
                && self.requeue(job, epoch, |row| row.status == Status::Dispatched && row.ack_deadline.is_some())
            {
                if let Some(session) = &mut self.agents[agent].session {
                    session.tracked.remove(&job);
                }
                self.cut(agent);
            }
            let row = &self.rows[job];
            if row.status == Status::Recovering && row.recovery_deadline <= self.now {
                let decision = recovery_expired(Self::lost(row, true));
                self.carry_out(job, epoch, agent, decision);
            }
        }
    }

    fn register(&mut self, agent: usize) {
        if self.agents[agent].session.is_some() {
            return;
        }
        let held = |job: usize, epoch: u32| Held { job, epoch };
        let listed: Vec<_> = self.agents[agent].jobs.iter().map(|(job, (epoch, _))| held(*job, *epoch)).collect();
        let outbox: Vec<_> = self.agents[agent].outbox.keys().map(|(job, epoch)| held(*job, *epoch)).collect();
        let owned: Vec<_> = (0..JOBS)
            .filter(|job| {
                let row = &self.rows[*job];
                row.agent == Some(agent) && matches!(row.status, Status::Dispatched | Status::Recovering)
            })
            .map(|job| held(job, self.rows[job].epoch))
            .collect();
        let decided = reconcile(&listed, &outbox, &owned);
        let mut session = Session::default();
        for Held { job, epoch } in decided.abandon {
            self.agents[agent].jobs.remove(&job);
            self.agents[agent].outbox.remove(&(job, epoch));
        }
        for Held { job, epoch } in decided.try_resume.into_iter().chain(decided.awaiting_outbox) {
            let row = &mut self.rows[job];
            row.status = Status::Dispatched;
            row.acked = true;
            row.ack_deadline = None;
            session.tracked.insert(job, epoch);
            if row.cancelling {
                session.down.push_back(Down::Cancel(job, epoch));
            }
            // An agent asks again for a start that was not answered.
            if self.agents[agent].jobs.get(&job) == Some(&(epoch, Phase::Prepared)) {
                session.up.push_back(Up::Start(job, epoch));
            }
        }
        for ((job, epoch), outcome) in &self.agents[agent].outbox {
            session.up.push_back(Up::Done(*job, *epoch, outcome));
        }
        self.agents[agent].session = Some(session);
        for Held { job, epoch } in decided.forgotten {
            let decision = forgotten(Self::lost(&self.rows[job], true));
            self.carry_out(job, epoch, agent, decision);
        }
    }

    fn cancel(&mut self, job: usize) {
        let row = &mut self.rows[job];
        match row.status {
            Status::Ended(_) => {}
            Status::Pending => self.end(job, "cancelled"),
            Status::Dispatched | Status::Recovering => {
                row.cancelling = true;
                let (epoch, agent) = (row.epoch, row.agent);
                let session = agent.and_then(|agent| self.agents[agent].session.as_mut());
                match session.filter(|session| session.tracked.contains_key(&job)) {
                    Some(session) => session.down.push_back(Down::Cancel(job, epoch)),
                    None => self.end(job, "cancelled"),
                }
            }
        }
    }

    // ---- the agent ----

    fn act(&mut self, agent: usize) {
        let me = &mut self.agents[agent];
        let Some(session) = &mut me.session else { return };
        let Some(down) = session.down.pop_front() else { return };
        match down {
            Down::Offer(job, epoch) => {
                me.jobs.insert(job, (epoch, Phase::Prepared));
                session.up.push_back(Up::Ack(job, epoch));
                session.up.push_back(Up::Start(job, epoch));
            }
            Down::Granted(job, epoch) => {
                if me.jobs.get(&job) == Some(&(epoch, Phase::Prepared)) {
                    me.jobs.insert(job, (epoch, Phase::Running));
                    self.starts[job] += 1;
                }
            }
            Down::Denied(job, epoch) => {
                if me.jobs.get(&job).is_some_and(|(held, _)| *held == epoch) {
                    me.jobs.remove(&job);
                }
            }
            Down::Cancel(job, epoch) => {
                let known = me.jobs.get(&job).is_some_and(|(held, _)| *held == epoch);
                if known {
                    me.jobs.remove(&job);
                }
                if known || !me.outbox.contains_key(&(job, epoch)) {
                    me.outbox.insert((job, epoch), "cancelled");
                    session.up.push_back(Up::Done(job, epoch, "cancelled"));
                }
            }
            Down::Acked(job, epoch) => {
                me.outbox.remove(&(job, epoch));
            }
        }
    }

    fn finish(&mut self, agent: usize, job: usize) {
        let me = &mut self.agents[agent];
        let Some((epoch, phase)) = me.jobs.get(&job).copied() else { return };
        let outcome = match phase {
            Phase::Running => "success",
            Phase::Prepared => "failed",
        };
        me.jobs.remove(&job);
        me.outbox.insert((job, epoch), outcome);
        if let Some(session) = &mut me.session {
            session.up.push_back(Up::Done(job, epoch, outcome));
        }
    }

    fn restart_agent(&mut self, agent: usize) {
        self.cut(agent);
        let me = &mut self.agents[agent];
        for (job, (epoch, _)) in std::mem::take(&mut me.jobs) {
            // Half of the time the record of the job is lost with the machine.
            if self.dice.roll(2) == 0 {
                me.outbox.insert((job, epoch), "failed");
            }
        }
    }

    fn fence(&mut self) {
        for me in self.agents.iter_mut().filter(|me| me.session.is_none() && self.now >= me.cut_at + FENCE) {
            for (job, (epoch, _)) in std::mem::take(&mut me.jobs) {
                me.outbox.insert((job, epoch), "failed");
            }
        }
    }

    fn step(&mut self, faults: bool) {
        let (agent, job) = (self.dice.roll(AGENTS), self.dice.roll(JOBS));
        match self.dice.roll(if faults { 16 } else { 10 }) {
            0 => self.claim(),
            1 | 2 => self.act(agent),
            3..=5 => self.receive(agent),
            6 => self.register(agent),
            7 => self.finish(agent, job),
            8 => {
                self.now += 1;
                self.fence();
            }
            9 => self.sweep(),
            10 | 11 => self.cut(agent),
            12 => self.crash(),
            13 => self.restart_agent(agent),
            14 => self.cancel(job),
            _ => {
                self.now += 40;
                self.fence();
            }
        }
        self.check();
    }

    fn check(&self) {
        for job in 0..JOBS {
            assert!(self.starts[job] <= 1, "the user code of job {job} started {} times", self.starts[job]);
            let running = self.agents.iter().filter(|a| matches!(a.jobs.get(&job), Some((_, Phase::Running)))).count();
            assert!(running <= 1, "job {job} runs on {running} agents");
        }
    }

    fn ended(&self) -> bool {
        self.rows.iter().all(|row| matches!(row.status, Status::Ended(_)))
    }
}

fn run(seed: u64) {
    let mut world = World::new(seed);
    for _ in 0..FAULTY_STEPS {
        world.step(true);
    }
    let ends: Vec<Status> = world.rows.iter().map(|row| row.status).collect();
    for _ in 0..CALM_STEPS {
        if world.ended() {
            break;
        }
        world.step(false);
    }
    assert!(world.ended(), "a job hangs: {:?}", world.rows);
    for (before, after) in ends.iter().zip(&world.rows) {
        assert!(!matches!(before, Status::Ended(_)) || *before == after.status, "a terminal job changed");
    }
}

#[test]
fn user_code_starts_at_most_once_and_every_job_ends_in_any_interleaving() {
    for seed in 0..SCHEDULES {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
