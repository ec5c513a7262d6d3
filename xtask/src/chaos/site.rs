//! The installation under test: an orchestrator, its database, agents with a wire each, and a repository.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kici_engine::time::{Clock, Ts};
use kici_sys::clock::SystemClock;
use nix::unistd::{Uid, User};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::load::Workload;
use super::plan::{Fault, Timed, Victim, Weather};
use super::process::Supervised;
use super::proxy::Proxy;
use crate::bench::postgres;
use crate::dev::children::kici;
use crate::dev::repo::Repo;
use crate::dev::server::Server;

/// How long a lost agent may take to come back. Shorter than in life, so that the end is not far.
pub(super) const RECOVERY: Duration = Duration::from_secs(30);

/// Where everything of one run lies.
pub(super) struct Site {
    pub(super) server: Server,
    pub(super) source: String,
    pub(super) sha: String,
    pub(super) orchestrator: Arc<Supervised>,
    pub(super) database: Option<Arc<Supervised>>,
    pub(super) agents: Vec<Arc<Supervised>>,
    proxies: Vec<Proxy>,
    kills: Mutex<Vec<(usize, Ts)>>,
    supervision: JoinSet<()>,
}

impl Site {
    pub(super) async fn start(
        binaries: &Path,
        directory: &Path,
        agents: usize,
        with_postgres: bool,
        load: &Workload,
    ) -> Result<Self> {
        let database = if with_postgres { Some(start_postgres(directory).await?) } else { None };
        let repo = load.repository(directory)?;
        let data = directory.join("data");
        std::fs::create_dir(&data)?;
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let url = database.as_ref().map(|(_, url)| url.clone());
        let orchestrator = Arc::new(orchestrator(binaries, directory, &data, &repo, url, address));
        orchestrator.start().await?;
        let server = Server::connect(address, &data).await?;
        let source = server.source_of(&repo).await?;
        let sha = repo.head()?.0.after;
        let token = server.agent_token(&directory.join("agent-token")).await?;
        let mut site = Self {
            server,
            source,
            sha,
            orchestrator,
            database: database.map(|(server, _)| server),
            agents: Vec::new(),
            proxies: Vec::new(),
            kills: Mutex::default(),
            supervision: JoinSet::new(),
        };
        for number in 0..agents {
            let proxy = Proxy::to(address).await?;
            let agent = Arc::new(agent(binaries, directory, number, &token, proxy.url()));
            agent.start().await?;
            site.agents.push(agent);
            site.proxies.push(proxy);
        }
        let all = site.agents.iter().chain([&site.orchestrator]).chain(&site.database);
        for program in all.cloned().collect::<Vec<_>>() {
            site.supervision.spawn(async move { program.supervise().await });
        }
        Ok(site)
    }

    /// Carries the faults out, and waits until each of them is over.
    pub(super) async fn suffer(&self, faults: Vec<Timed>, start: Instant) -> Result<()> {
        let each = faults.into_iter().map(|(at, fault)| async move {
            sleep_until(start + at).await;
            eprintln!("{:7.2} s  {fault}", at.as_secs_f64());
            self.inflict(fault).await
        });
        futures::future::try_join_all(each).await?;
        for proxy in &self.proxies {
            proxy.set(None);
        }
        Ok(())
    }

    async fn inflict(&self, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill(victim, rest) => {
                let Some(program) = self.program(victim) else { return Ok(()) };
                if let Victim::Agent(number) = victim {
                    self.kills.lock().unwrap_or_else(PoisonError::into_inner).push((number, SystemClock.now()));
                }
                program.kill_and_restart(rest).await
            }
            Fault::Freeze(victim, lasts) => {
                if let Some(program) = self.program(victim) {
                    program.freeze(lasts).await;
                }
                Ok(())
            }
            Fault::Network { agent, weather, lasts, then_cut } => {
                let proxy = &self.proxies[agent];
                proxy.set(Some(weather));
                tokio::time::sleep(lasts).await;
                if then_cut || weather == Weather::Cut {
                    proxy.cut_open();
                }
                proxy.set(None);
                Ok(())
            }
        }
    }

    fn program(&self, victim: Victim) -> Option<&Arc<Supervised>> {
        match victim {
            Victim::Agent(number) => self.agents.get(number),
            Victim::Orchestrator => Some(&self.orchestrator),
            Victim::Database => self.database.as_ref(),
        }
    }

    /// When each agent was killed, by its name.
    pub(super) fn kills(&self) -> Vec<(String, Ts)> {
        let kills = self.kills.lock().unwrap_or_else(PoisonError::into_inner);
        kills.iter().map(|(number, at)| (self.agents[*number].name.clone(), *at)).collect()
    }

    /// Ends everything.
    pub(super) async fn stop(mut self) {
        for program in self.agents.iter().chain([&self.orchestrator]).chain(&self.database) {
            program.finish().await;
        }
        self.supervision.shutdown().await;
    }
}

fn orchestrator(
    binaries: &Path,
    directory: &Path,
    data: &Path,
    repo: &Repo,
    database: Option<String>,
    address: SocketAddr,
) -> Supervised {
    let mut variables = vec![
        ("KICI_DATA_DIR", data.display().to_string()),
        ("KICI_SERVER_LISTEN", address.to_string()),
        ("KICI_SOURCES_LOCAL_PATHS", repo.path.display().to_string()),
        ("KICI_STARTUP_BACKOFF_MS", "0".to_owned()),
        ("KICI_AGENT_RECOVERY_WINDOW_MS", RECOVERY.as_millis().to_string()),
        // Faults undo more deliveries than life does; a job that is given up would hide what is looked for.
        ("KICI_QUEUE_MAX_ATTEMPTS", "50".to_owned()),
        ("KICI_STALE_JOB_HEARTBEAT_MS", "10000".to_owned()),
        ("KICI_LOG_FORMAT", "json".to_owned()),
        ("KICI_LOG_LEVEL", "info,kici_dispatch=debug".to_owned()),
    ];
    variables.extend(database.map(|url| ("KICI_DATABASE_URL", url)));
    let binary = binaries.join("kici-orchestrator");
    Supervised::new("orchestrator", directory, false, move || kici(&binary, &variables))
}

fn agent(binaries: &Path, directory: &Path, number: usize, token: &str, url: String) -> Supervised {
    let name = format!("agent-{number}");
    let variables = vec![
        ("KICI_ORCHESTRATOR_URL", url),
        ("KICI_AGENT_TOKEN", token.to_owned()),
        ("KICI_AGENT_ID", name.clone()),
        ("KICI_LABELS", "default".to_owned()),
        ("KICI_STATE_DIR", directory.join(&name).display().to_string()),
        ("KICI_PORT", "0".to_owned()),
        // Every second one may have two jobs.
        ("KICI_AGENT_MAX_CONCURRENCY", (1 + number % 2).to_string()),
        ("KICI_LOG_FORMAT", "json".to_owned()),
    ];
    let binary = binaries.join("kici-agent");
    Supervised::new(name, directory, false, move || kici(&binary, &variables))
}

/// A server that may be killed, and its address.
async fn start_postgres(directory: &Path) -> Result<(Arc<Supervised>, String)> {
    let bin = postgres::programs().context("PostgreSQL is not installed; use --database sqlite")?;
    // The server refuses to run as root.
    let user = if Uid::effective().is_root() {
        Some(User::from_name("postgres")?.context("there is no user postgres")?)
    } else {
        None
    };
    let owner = user.map(|user| (user.uid.as_raw(), user.gid.as_raw()));
    let home = directory.join("postgres");
    std::fs::create_dir(&home)?;
    if let Some((uid, gid)) = owner {
        chown(&home, Some(uid), Some(gid))?;
    }
    let data = home.join("data");
    let command = {
        let home = home.clone();
        move |program: PathBuf| {
            let mut command = Command::new(program);
            command.current_dir(&home);
            if let Some((uid, gid)) = owner {
                command.uid(uid).gid(gid);
            }
            command
        }
    };
    let made = command(bin.join("initdb")).args(["--auth=trust", "--username=kici", "-D"]).arg(&data).output().await?;
    if !made.status.success() {
        bail!("initdb: {}", String::from_utf8_lossy(&made.stderr));
    }
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let (server, sockets) = (bin.join("postgres"), home.clone());
    // Its children are frozen and killed with it: a server without its postmaster would go on for a while.
    let program = Supervised::new("postgres", directory, true, move || {
        let mut server = command(server.clone());
        server.arg("-D").arg(&data).args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
        server.arg("-c").arg(format!("unix_socket_directories={}", sockets.display()));
        server
    });
    program.start().await?;
    postgres::answers(&bin, port).await?;
    Ok((Arc::new(program), format!("postgres://kici@127.0.0.1:{port}/postgres")))
}
