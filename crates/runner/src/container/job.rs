//! The containers of one job.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::{try_join, try_join_all};
use kici_containers::{Credentials, Engine, Image, Owner, single_file};
use kici_engine::jobspec::JobSpec;
use kici_engine::lock::{Container, Pull, RegistryCredentials, Service};
use kici_sys::cgroup::Usage;
use kici_sys::init::wire::{File, Left, Start};
use kici_sys::process::Spawn;
use secrecy::SecretString;
use tokio::sync::mpsc;

use super::calls::{Answering, Calls};
use super::files::Door;
use super::link::{Link, Process, Stream};
use super::spec::{self, Bounds, Names, SCRATCH, WORKSPACE};
use super::{Containers, PROGRAM_LABEL, remove, said, services};
use crate::config::Config;
use crate::key::JobKey;

/// How long the first process may take to end everything before the engine does it.
const KILL: Duration = Duration::from_secs(10);
/// The engine's words for a program that is not there.
const NO_PROGRAM: [&str; 3] = ["no such file or directory", "not found", "executable file"];

/// What a job asks for of an engine.
#[derive(Clone, Debug)]
pub struct Wanted {
    container: Option<Container>,
    services: BTreeMap<String, Service>,
    bounds: Bounds,
}

impl Wanted {
    /// What this job asks for; none when nothing. A job without a container gets the agent's own where it has one.
    ///
    /// # Errors
    /// In words, when the agent does not allow it.
    pub fn of(spec: &JobSpec, config: &Config) -> Result<Option<Self>, String> {
        let policy = &config.containers;
        let container =
            if policy.already_inside { None } else { spec.container.clone().or_else(|| policy.by_default()) };
        if let Some(container) = &container {
            spec::allowed(container, policy)?;
        }
        if container.is_none() && spec.services.is_empty() {
            return Ok(None);
        }
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
        let bounds = spec::bounds(&config.isolation.limits, spec.resources.as_ref(), processors);
        Ok(Some(Self { container, services: spec.services.clone(), bounds }))
    }

    /// Whether the steps run in a container.
    pub fn has_container(&self) -> bool {
        self.container.is_some()
    }
}

/// Lines for the log of the preparation.
#[derive(Clone, Debug)]
pub struct Notes(mpsc::UnboundedSender<String>);

impl Notes {
    /// And where they come out.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<String>) {
        let (to, from) = mpsc::unbounded_channel();
        (Self(to), from)
    }

    /// A line.
    pub fn say(&self, line: impl Into<String>) {
        // Nobody reads any more: the job is over.
        let _ = self.0.send(line.into());
    }
}

/// What was made for a job.
pub struct JobContainers {
    engine: Engine,
    made: Option<Made>,
    /// Where services are, as variables.
    pub variables: BTreeMap<String, String>,
}

struct Made {
    id: String,
    door: Door,
    /// Engines put nothing into a container whose root cannot be written.
    through_door: bool,
    owner: Owner,
    link: Link,
    env: BTreeMap<String, String>,
}

/// A container that steps can be started in.
pub struct Entered {
    /// It.
    pub inside: Arc<Inside>,
    /// The environment of the image.
    pub env: BTreeMap<String, String>,
}

impl Containers {
    /// Makes and starts everything for a job but the contents of its workspace, and waits for its services.
    ///
    /// # Errors
    /// In words. What was made is still there: see [`Containers::clean`].
    pub async fn prepare(
        &self,
        job: JobKey,
        wanted: &Wanted,
        answering: Option<Answering>,
        notes: &Notes,
    ) -> Result<JobContainers, String> {
        let engine = self.engine().await?;
        notes.say(format!("{} {} at {}", engine.kind, engine.version, engine.socket().display()));
        let names = self.names(job);
        let inside = wanted.container.is_some();
        // Networks need nothing of images and the other way round.
        let network = async { engine.create_network(&names.job, &names.labels).await.map_err(said) };
        let images = images(&engine, wanted, notes);
        let (_, images) = try_join(network, images).await?;
        let services = wanted
            .services
            .iter()
            .map(|(name, service)| services::start(&engine, name, service, &names, wanted.bounds, inside, notes));
        let container = async {
            match &wanted.container {
                Some(container) => {
                    let calls = Calls::new(answering);
                    self.make(&engine, container, &images, &names, wanted.bounds, calls).await.map(Some)
                }
                None => Ok(None),
            }
        };
        let (services, made) = try_join(try_join_all(services), container).await?;
        let variables = services.into_iter().flatten().collect();
        Ok(JobContainers { engine, made, variables })
    }

    async fn make(
        &self,
        engine: &Engine,
        container: &Container,
        images: &BTreeMap<String, Image>,
        names: &Names,
        bounds: Bounds,
        calls: Calls,
    ) -> Result<Made, String> {
        let name = spec::text(&container.image);
        let image = images.get(name).ok_or_else(|| format!("image `{name}` is not there"))?;
        let user = container.user.clone().unwrap_or_else(|| image.user.clone());
        self.bring_program(engine, &image.id, names, false).await?;
        engine.create_volume(&names.job, &names.labels).await.map_err(said)?;
        let document = spec::job_document(container, &user, names, bounds);
        let id = engine.create(&names.job, &document).await.map_err(said)?;
        let (uid, gid) = self.owner(engine, &id, &user).await?;
        let document = spec::door_document(&image.id, names, &names.job, WORKSPACE);
        let door = Door::new(format!("{}-door", names.job), document);
        if let Err(error) = engine.start(&id).await.map_err(said) {
            if !NO_PROGRAM.iter().any(|words| error.contains(words)) {
                return Err(error);
            }
            self.bring_program(engine, &image.id, names, true).await?;
            engine.start(&id).await.map_err(said)?;
        }
        let attached = engine.attach(&id).await.map_err(said)?;
        let (link, env) = Link::open(attached, calls).await?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let mut env: BTreeMap<String, String> =
            env.into_iter().map(|(name, value)| (text(name), text(value))).collect();
        env.retain(|name, _| !name.starts_with("KICI_"));
        env.extend(container.env.iter().map(|(name, value)| (name.clone(), spec::text(value).to_owned())));
        let through_door = container.options.read_only;
        Ok(Made { id, door, through_door, owner: Owner { uid, gid }, link, env })
    }

    /// Puts our program onto the engine, in a volume that all jobs read and none can write. Only the first job of an engine waits
    /// for that; `again` when it is there but empty, as after a crash in between.
    async fn bring_program(&self, engine: &Engine, image: &str, names: &Names, again: bool) -> Result<(), String> {
        let mut brought = self.runtime.lock().await;
        if !again && (*brought || engine.has_volume(&names.runtime).await.map_err(said)?) {
            *brought = true;
            return Ok(());
        }
        let labels = [(PROGRAM_LABEL.to_owned(), "true".to_owned())].into();
        engine.create_volume(&names.runtime, &labels).await.map_err(said)?;
        let document = spec::door_document(image, names, &names.runtime, spec::RUNTIME);
        let id = engine.create(&format!("{}-program", names.job), &document).await.map_err(said)?;
        let archive = single_file("kici-init", kici_sys::init::PROGRAM).map_err(|error| error.to_string())?;
        let link = single_file("kici", kici_sys::init::PROGRAM).map_err(|error| error.to_string())?;
        for archive in [archive, link] {
            let body = futures::stream::iter([Ok(archive.into())]);
            engine.put(&id, spec::RUNTIME, body).await.map_err(said)?;
        }
        let left = kici_containers::Left { containers: vec![id], ..Default::default() };
        if let Some(error) = engine.remove(&left).await.failed {
            return Err(said(error));
        }
        *brought = true;
        Ok(())
    }

    /// User and group of the steps by number.
    async fn owner(&self, engine: &Engine, id: &str, user: &str) -> Result<(u32, u32), String> {
        let is_number = |text: &str| text.parse::<u32>().is_ok();
        if user.is_empty() || user.split_once(':').is_some_and(|(user, group)| is_number(user) && is_number(group)) {
            return spec::ids(user, "", "");
        }
        let passwd = text_of(engine, id, "/etc/passwd").await?;
        let group = if user.contains(':') { text_of(engine, id, "/etc/group").await? } else { String::new() };
        spec::ids(user, &passwd, &group)
    }

    /// Fills the workspace.
    ///
    /// # Errors
    /// In words. What was made is still there: see [`Containers::clean`].
    pub async fn enter(
        &self,
        job: &mut JobContainers,
        workspace: &Path,
        scratch: &Path,
    ) -> Result<Option<Entered>, String> {
        let Some(made) = job.made.take() else { return Ok(None) };
        let engine = &job.engine;
        let by = if made.through_door { made.door.open(engine).await? } else { made.id.clone() };
        engine.fill(&by, WORKSPACE, workspace, made.owner).await.map_err(said)?;
        let inside = Inside {
            engine: engine.clone(),
            id: made.id,
            link: made.link,
            door: made.door,
            owner: made.owner,
            home: made.env.get("HOME").map(PathBuf::from).filter(|dir| dir.is_absolute()),
            workspace: workspace.to_owned(),
            scratch: scratch.to_owned(),
            first_files: Mutex::default(),
            lists: AtomicU32::default(),
        };
        Ok(Some(Entered { inside: Arc::new(inside), env: made.env }))
    }

    /// Ends all containers of a job and keeps them.
    pub async fn end(&self, job: JobKey) {
        let ended = async {
            let engine = self.engine().await?;
            let left = engine.labelled(&self.of_job(job)).await.map_err(said)?;
            try_join_all(left.containers.iter().map(|id| engine.kill(id))).await.map_err(said).map(drop)
        };
        if let Err(error) = ended.await {
            tracing::error!(%job, error, "the containers of a job cannot be ended");
        }
    }

    /// Removes everything of a job. What cannot be removed stays to the next start of the agent, which looks for it.
    pub async fn clean(&self, job: JobKey) {
        let removed = async {
            let engine = self.engine().await?;
            engine.settled().await;
            remove(&engine, &self.of_job(job)).await
        };
        if let Err(error) = removed.await {
            tracing::error!(%job, error, "what the job left on the container engine is not gone; the next start tries again");
        }
    }
}

/// Every image of a job, fetched where that is asked for.
async fn images(engine: &Engine, wanted: &Wanted, notes: &Notes) -> Result<BTreeMap<String, Image>, String> {
    let mut all: BTreeMap<&str, (Pull, Option<&RegistryCredentials>)> = BTreeMap::new();
    for service in wanted.services.values() {
        all.insert(spec::text(&service.image), (Pull::Missing, service.credentials.as_ref()));
    }
    if let Some(container) = &wanted.container {
        all.insert(spec::text(&container.image), (container.pull, container.credentials.as_ref()));
    }
    let each = all.into_iter().map(|(name, (pull, credentials))| async move {
        let there = engine.image(name).await.map_err(said)?;
        if spec::must_pull(name, pull, there.is_some())? {
            notes.say(format!("fetching image `{name}`"));
            let credentials = credentials.map(|credentials| Credentials {
                user: credentials.user.value().to_owned(),
                token: SecretString::from(credentials.token.value().to_owned()),
            });
            engine.pull(name, credentials.as_ref(), |line| notes.say(line)).await.map_err(said)?;
        } else if let Some(image) = there {
            return Ok((name.to_owned(), image));
        }
        let image = engine.image(name).await.map_err(said)?;
        let image = image.ok_or_else(|| format!("image `{name}` was fetched and is not there"))?;
        Ok::<_, String>((name.to_owned(), image))
    });
    Ok(try_join_all(each).await?.into_iter().collect())
}

/// A file of a container as text; empty when it is not there.
async fn text_of(engine: &Engine, id: &str, path: &str) -> Result<String, String> {
    let Some(archive) = engine.get(id, path).await.map_err(said)? else { return Ok(String::new()) };
    kici_containers::first_text(&archive).map_err(|error| format!("{path} of the image cannot be read: {error}"))
}

/// The inside of the container of a job.
pub struct Inside {
    pub(super) engine: Engine,
    id: String,
    pub(super) link: Link,
    pub(super) door: Door,
    /// Of what is put in.
    pub(super) owner: Owner,
    /// The home directory of the steps, inside.
    pub(super) home: Option<PathBuf>,
    /// On the host.
    workspace: PathBuf,
    /// On the host.
    scratch: PathBuf,
    /// Files that the first command brings along.
    first_files: Mutex<Vec<PathBuf>>,
    /// How many lists of files were brought in.
    pub(super) lists: AtomicU32,
}

impl Inside {
    /// Where a file or directory of the job is inside.
    pub fn place(&self, path: &Path) -> PathBuf {
        let below = |root: &Path, inside: &str| {
            let rest = path.strip_prefix(root).ok()?;
            Some(if rest.as_os_str().is_empty() { PathBuf::from(inside) } else { Path::new(inside).join(rest) })
        };
        below(&self.scratch, SCRATCH).or_else(|| below(&self.workspace, WORKSPACE)).unwrap_or_else(|| path.to_owned())
    }

    /// Directories of steps, judged without looking: the first process looks when the step starts.
    ///
    /// # Errors
    /// Why it may not be one.
    pub fn directory(&self, text: &str) -> Result<PathBuf, &'static str> {
        let path = Path::new(text);
        match path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            true => Ok(self.workspace.join(path)),
            false => Err("lies outside the workspace"),
        }
    }

    /// A file of the host that is to be there from the first command on.
    pub fn bring(&self, path: &Path) {
        self.first_files.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_owned());
    }

    /// Starts a command. `files` lie on the host and are made inside under [`Inside::place`]; `or` is taken where the program
    /// does not exist.
    ///
    /// # Errors
    /// In words.
    pub async fn start(
        &self,
        spawn: &Spawn,
        or: Option<&(OsString, Vec<OsString>)>,
        files: &[PathBuf],
    ) -> Result<(Process, Stream, Stream), String> {
        let bytes = |text: &std::ffi::OsStr| text.as_bytes().to_vec();
        let inside = |path: &Path| self.place(path).into_os_string().into_vec();
        let words = |program: &OsString, args: &[OsString]| {
            // A word that is a file of the job, as the script is, lies elsewhere in there.
            std::iter::once(program).chain(args).map(|word| inside(Path::new(word))).collect()
        };
        let mut commands = vec![words(&spawn.program, &spawn.args)];
        commands.extend(or.map(|(program, args)| words(program, args)));
        let first = std::mem::take(&mut *self.first_files.lock().unwrap_or_else(PoisonError::into_inner));
        let read = |path: &PathBuf| -> Result<File, String> {
            let content = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
            let mode = std::os::unix::fs::PermissionsExt::mode(
                &path.metadata().map_err(|error| format!("{}: {error}", path.display()))?.permissions(),
            );
            Ok(File { path: inside(path), mode: mode & 0o777, content })
        };
        let start = Start {
            id: 0,
            root: WORKSPACE.into(),
            cwd: inside(&spawn.cwd),
            env: spawn.env.iter().map(|(name, value)| (bytes(name), bytes(value))).collect(),
            commands,
            files: first.iter().chain(files).map(read).collect::<Result<_, _>>()?,
            back: files.iter().map(|path| inside(path)).collect(),
        };
        self.link.start(start).await
    }

    /// Puts what a command left in its files to where it is looked for on the host.
    pub fn bring_back(&self, process: &Process, files: &[PathBuf]) {
        let Some(exited) = process.exited() else { return };
        for path in files {
            let name = self.place(path).into_os_string().into_vec();
            let Some((_, left)) = exited.back.iter().find(|(back, _)| *back == name) else { continue };
            let done = match left {
                Left::Content(content) => std::fs::write(path, content),
                Left::Gone => std::fs::remove_file(path),
                // No plain file there is none here.
                Left::Unreadable => std::fs::remove_file(path).and_then(|()| std::fs::create_dir(path)),
            };
            if let Err(error) = done {
                tracing::warn!(path = %path.display(), %error, "a file of a step cannot be taken over");
            }
        }
    }

    /// Ends a command with all that it started; where the first process does not manage, the whole container.
    pub async fn kill(&self, process: &Process) -> u32 {
        match process.kill(KILL).await {
            Some(count) => count,
            None => self.end().await,
        }
    }

    /// Ends everything in the container. Returns how many processes that were, as far as it is known.
    pub async fn kill_all(&self) -> u32 {
        match self.link.kill_all(KILL).await {
            Some(count) => count,
            None => self.end().await,
        }
    }

    async fn end(&self) -> u32 {
        if let Err(error) = self.engine.kill(&self.id).await {
            tracing::error!(%error, "a container cannot be ended");
        }
        1
    }

    /// Why nothing can be started any more.
    pub fn closed(&self) -> Option<String> {
        self.link.closed()
    }

    /// What was used so far.
    pub async fn usage(&self) -> Usage {
        let usage = self.link.usage().await;
        if self.closed().is_none() {
            return usage;
        }
        // The first process was ended too: then only the engine knows.
        let state = self.engine.inspect(&self.id).await.unwrap_or_default();
        Usage { oom_kills: u64::from(state.oom_killed), ..usage }
    }
}
