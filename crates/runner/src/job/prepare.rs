//! What the steps of a job will find.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kici_engine::jobspec::JobSpec;

use super::Ctx;
use super::contained::Contained;
use crate::confine::JobConfinement;
use crate::container::{Entered, RUNTIME, SOCKET};
use crate::credentials::Access;
use crate::stash::Stash;
use crate::steps;
use crate::steps::environment::{DEFAULT_PATH, job_facing};

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
        let (mut host, inside) = match entered {
            Some(Entered { inside, env }) => (env, Some(inside)),
            None => (self.config.host_env.clone(), None),
        };
        host.extend(variables);
        let event = job_facing.iter_mut().find(|(name, _)| *name == "KICI_EVENT_PATH");
        match &inside {
            // What names files names them in there.
            Some(inside) => {
                if let Some((_, event)) = event {
                    inside.bring(Path::new(event));
                    *event = inside.place(Path::new(event)).display().to_string();
                }
            }
            None => {
                if let Some((_, event)) = event {
                    confine.give(Path::new(event))?;
                }
                for dir in [workspace.parent(), Some(&*scratch)].into_iter().flatten() {
                    confine.open_way(dir)?;
                }
                confine.give_all(&workspace)?;
                access.map_or(Ok(()), |access| access.give(&confine))?;
            }
        }
        if let Some(access) = access {
            let (bin, socket) = match &inside {
                Some(_) => (Path::new(RUNTIME), Path::new(SOCKET)),
                None => (&*access.bin, access.socket()),
            };
            job_facing.push(("KICI_SOCK", socket.display().to_string()));
            let path = host.get("PATH").map_or(DEFAULT_PATH, String::as_str);
            let path = format!("{}:{path}", bin.display());
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
            orphan_cleanup: self.config.isolation.orphan_cleanup || inside.is_some(),
            container: inside,
            stash: Some(stash),
        })
    }
}
