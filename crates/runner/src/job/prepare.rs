//! What the steps of a job will find.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kici_engine::jobspec::JobSpec;

use super::Ctx;
use super::contained::Contained;
use crate::confine::JobConfinement;
use crate::container::Entered;
use crate::credentials::Access;
use crate::stash::Stash;
use crate::steps;
use crate::steps::environment::{DEFAULT_PATH, job_facing};

/// Whether a job restores, saves, takes or hands over files.
pub(super) fn keeps_files(spec: &JobSpec) -> bool {
    let mut steps = spec.steps.iter().chain(&spec.init);
    !spec.cache.is_empty() || spec.artifacts != Default::default() || steps.any(|step| !step.cache.is_empty())
}

impl Ctx {
    /// Everything that user code will find, short of running it.
    #[allow(clippy::too_many_arguments, reason = "each is a part of the job that was made by another one")]
    pub(super) fn prepare(
        &self,
        spec: JobSpec,
        workspace: PathBuf,
        scratch: PathBuf,
        access: Option<&Access>,
        confine: Arc<JobConfinement>,
        contained: Contained,
        stash: Arc<Stash>,
    ) -> io::Result<steps::Job> {
        let mut job_facing = job_facing(self.key.run, self.key.job, &spec, &scratch)?;
        let Contained { entered, variables } = contained;
        if let Some(Entered { inside, env }) = entered {
            return Ok(
                self.prepare_inside(spec, workspace, scratch, access, confine, inside, env, variables, job_facing)
            );
        }
        if let Some((_, event)) = job_facing.iter().find(|(name, _)| *name == "KICI_EVENT_PATH") {
            confine.give(Path::new(event))?;
        }
        for dir in [workspace.parent(), Some(&*scratch)].into_iter().flatten() {
            confine.open_way(dir)?;
        }
        confine.give_all(&workspace)?;
        let mut host = self.config.host_env.clone();
        host.extend(variables);
        if let Some(access) = access {
            access.give(&confine)?;
            job_facing.push(("KICI_SOCK", access.socket().display().to_string()));
            let path = host.get("PATH").map_or(DEFAULT_PATH, String::as_str);
            let path = format!("{}:{path}", access.bin.display());
            host.insert("PATH".to_owned(), path);
            // Nobody is there to be asked.
            host.insert("GIT_TERMINAL_PROMPT".to_owned(), "0".to_owned());
        }
        Ok(steps::Job {
            spec,
            workspace,
            scratch,
            host,
            job_facing,
            git_config: access.map_or_else(Vec::new, |access| access.helper.keys().to_vec()),
            agent: self.agent.clone(),
            masker: Arc::clone(&self.masker),
            spool: Arc::clone(&self.spool),
            clock: Arc::clone(&self.clock),
            step_timeout: self.config.default_step_timeout,
            deadline: None,
            confine,
            container: None,
            orphan_cleanup: self.config.isolation.orphan_cleanup,
            stash: Some(stash),
        })
    }
}
