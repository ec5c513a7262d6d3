//! What a job in a container costs over the plain command, on an image that the engine has.

use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::time::Instant;

use super::bare::ended;
use super::measure::{Effort, Figures};
use super::node::{Node, Work};
use super::stats::Samples;
use crate::engines;
use crate::workspace::Workspace;

/// Makes the image of [`Work::Contained`] on the engine of this measurement: a shell and nothing else.
fn image(workspace: &Workspace, host: &str) -> Result<()> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| std::path::Path::new(path).is_file());
    let busybox = busybox.context("busybox is not installed (apt-get install busybox-static)")?;
    let directory = tempfile::tempdir()?;
    let root = directory.path().join("root");
    std::fs::create_dir_all(root.join("bin"))?;
    std::fs::copy(busybox, root.join("bin/busybox"))?;
    for applet in ["sh", "true"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet))?;
    }
    let (archive, name) = (directory.path().join("root.tar"), super::node::IMAGE);
    let shell = &workspace.shell;
    xshell::cmd!(shell, "tar -C {root} -cf {archive} .").quiet().run()?;
    xshell::cmd!(shell, "docker -H {host} import {archive} {name}").quiet().ignore_stdout().run()?;
    Ok(())
}

/// An engine for the time of the measurement, with the image on it. The agent finds it by what this names.
pub(crate) fn engine(workspace: &Workspace) -> Result<(engines::Engines, String)> {
    let running = engines::start(workspace)?;
    let host = workspace.shell.var("KICI_TEST_DOCKER_HOST").context("there is no Docker to measure with")?;
    image(workspace, &host)?;
    Ok((running, host))
}

/// From the making of the job to its end, with everything that is made for it, less what its only command takes by itself.
pub(crate) async fn container(node: &Arc<Node>, effort: Effort, host: &str) -> Result<Figures> {
    let agent = node.agent_with(&[("KICI_CONTAINER_SOCKET", host.to_owned())]).await?;
    let (mut jobs, mut plain) = (Samples::default(), Samples::default());
    for round in 0..effort.of(60) {
        let detail = ended(node, Work::Contained).await?;
        let job = detail.jobs.first().context("the run has no job")?;
        let start = Instant::now();
        let mut command = tokio::process::Command::new("sh");
        command.args(["-e", "-c", "true"]).stdout(Stdio::null());
        anyhow::ensure!(command.status().await?.success(), "sh does not run");
        // The first rounds start the agent and put its program onto the engine.
        if round >= effort.of(10) {
            plain.add(start.elapsed());
            jobs.add(job.finished_at.context("the job has no end")?.since(job.created_at));
        }
    }
    agent.stop().await?;
    let over = |percent| jobs.percentile(percent) - plain.percentile(50);
    Ok(vec![("container_overhead_p50_ms", over(50)), ("container_overhead_p99_ms", over(99))])
}
