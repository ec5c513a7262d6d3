//! The PostgreSQL server that tests share.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use diesel::prelude::*;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use kici_engine::time::{ManualClock, Ts};
use sha2::{Digest, Sha256};
use tokio::sync::OnceCell;

use crate::Store;

const MIGRATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../migrations/postgres");

/// Stops the server once nobody has held the lock for a while. Run by `sh`, with the directory as `$1` and the programs'
/// directory as `$2`.
const JANITOR: &str = r#"
while sleep 20; do
  exec 9>>"$1/users.lock"
  if flock --nonblock --exclusive 9; then
    "$2/pg_ctl" -D "$1/data" -m immediate stop
    exit 0
  fi
  exec 9>&-
done
"#;

struct Server {
    /// Up to and with the `/` before the name of a database.
    base: String,
    template: String,
    /// Held as long as this process may use the server.
    _users: Option<File>,
}

static SERVER: OnceCell<Option<Server>> = OnceCell::const_new();

#[allow(clippy::disallowed_methods, reason = "tests are told by the environment which server to use")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The address of a fresh, migrated database.
pub(super) async fn database() -> Option<String> {
    let server = SERVER.get_or_init(start).await.as_ref();
    if server.is_none() && variable("KICI_REQUIRE_PG").is_some_and(|value| value == "1") {
        panic!("KICI_REQUIRE_PG=1, but there are no PostgreSQL server programs and no KICI_TEST_DATABASE_URL");
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let server = server?;
    let name = format!("t_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    execute(server, &format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await;
    execute(server, &format!("CREATE DATABASE {name} TEMPLATE {}", server.template)).await;
    Some(format!("{}{name}", server.base))
}

/// Drops a database that [`database`] made.
pub(super) async fn drop_database(url: &str) {
    if let Some(server) = SERVER.get().and_then(Option::as_ref)
        && let Some(name) = url.strip_prefix(&server.base)
    {
        execute(server, &format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await;
    }
}

async fn execute(server: &Server, sql: &str) {
    let mut conn =
        AsyncPgConnection::establish(&format!("{}postgres", server.base)).await.expect("the test server answers");
    conn.batch_execute(sql).await.expect("the statement runs");
}

async fn start() -> Option<Server> {
    let directory = std::env::temp_dir().join(format!("kici-test-pg-{}", user()));
    if let Some(url) = variable("KICI_TEST_DATABASE_URL") {
        let slash = url.rfind('/').expect("a database name in KICI_TEST_DATABASE_URL");
        fs::create_dir_all(&directory).expect("a directory for locks");
        let _lock = lock(&directory.join("start.lock"));
        return Some(ready(url[..=slash].to_owned(), None).await);
    }
    let programs = programs()?;
    let owner = owner();
    fs::create_dir_all(&directory).expect("a directory for the server");
    if let Some((uid, gid)) = owner {
        chown(&directory, Some(uid), Some(gid)).expect("the directory can be given to the server's user");
    }
    let users = open(&directory.join("users.lock"));
    users.lock_shared().expect("the server's lock");
    let _lock = lock(&directory.join("start.lock"));
    let path = directory.to_str().expect("a UTF-8 path").replace('/', "%2F");
    let base = format!("postgres://postgres@{path}/");
    if AsyncPgConnection::establish(&format!("{base}postgres")).await.is_err() {
        launch(&directory, &programs, owner);
    }
    Some(ready(base, Some(users)).await)
}

/// Names a template by the migrations that it holds: the server is shared by checkouts that may differ in them.
fn digest() -> String {
    let entries = fs::read_dir(MIGRATIONS).expect("the migrations are there");
    let mut scripts: Vec<_> = entries.map(|entry| entry.expect("an entry").path().join("up.sql")).collect();
    scripts.sort();
    let mut digest = Sha256::new();
    for script in scripts {
        digest.update(fs::read(script).expect("a migration is readable"));
    }
    hex::encode(digest.finalize())
}

/// Makes the template unless it is there.
async fn ready(base: String, users: Option<File>) -> Server {
    let digest = digest();
    let server = Server { template: format!("kici_template_{}", &digest[..12]), base, _users: users };
    let mut conn =
        AsyncPgConnection::establish(&format!("{}postgres", server.base)).await.expect("the test server answers");
    #[derive(QueryableByName)]
    struct Found {
        #[diesel(sql_type = diesel::sql_types::Bool)]
        found: bool,
    }
    // The comment is written last: a template without it is unfinished.
    let found: Found = diesel::sql_query(
        "SELECT EXISTS (SELECT 1 FROM pg_database d JOIN pg_shdescription s ON s.objoid = d.oid WHERE datname = $1) AS found",
    )
    .bind::<diesel::sql_types::Text, _>(&server.template)
    .get_result(&mut conn)
    .await
    .expect("the catalogue can be read");
    if !found.found {
        let name = &server.template;
        execute(&server, &format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await;
        execute(&server, &format!("CREATE DATABASE {name}")).await;
        let clock = Arc::new(ManualClock::new(Ts::from_micros(0)));
        let url = format!("{}{name}", server.base);
        let store = Store::open(super::config(&url, "template", clock)).await.expect("the template opens");
        store.migrate().await.expect("the template migrates");
        store.close().await;
        execute(&server, &format!("COMMENT ON DATABASE {name} IS 'migrated'")).await;
    }
    server
}

#[allow(clippy::zombie_processes, reason = "the janitor outlives this process")]
fn launch(directory: &Path, programs: &Path, owner: Option<(u32, u32)>) {
    let data = directory.join("data");
    let run = |command: &mut Command| {
        let output = command.stdin(Stdio::null()).output().expect("the program starts");
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    if !data.join("PG_VERSION").exists() {
        run(as_user(programs.join("initdb"), owner)
            .args(["--no-sync", "-U", "postgres", "-A", "trust", "-D"])
            .arg(&data));
    }
    // What a killed server left behind does not matter: it is not running, or it would have answered.
    let _ = fs::remove_file(data.join("postmaster.pid"));
    let options = format!(
        "-k {} -c listen_addresses='' -c fsync=off -c full_page_writes=off -c max_connections=300",
        directory.display()
    );
    run(as_user(programs.join("pg_ctl"), owner)
        .args(["-w", "-t", "60", "-l"])
        .arg(directory.join("log"))
        .args(["-o", &options, "-D"])
        .arg(&data)
        .arg("start")
        .stdout(Stdio::null()));
    as_user("sh".into(), owner)
        .args(["-c", JANITOR, "sh"])
        .arg(directory)
        .arg(programs)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("sh starts");
}

fn as_user(program: PathBuf, owner: Option<(u32, u32)>) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/");
    if let Some((uid, gid)) = owner {
        command.uid(uid).gid(gid);
    }
    command
}

fn open(path: &Path) -> File {
    let file = File::options().create(true).append(true).open(path).expect("a lock file");
    // The janitor runs as the server's user.
    let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o666));
    file
}

fn lock(path: &Path) -> File {
    let file = open(path);
    file.lock().expect("the lock");
    file
}

/// Where the newest server programs are.
fn programs() -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path().join("bin")))
        .filter(|path| path.join("initdb").exists())
        .collect();
    found.sort();
    found.pop()
}

/// The user that the server runs as when we are root, which initdb refuses.
fn owner() -> Option<(u32, u32)> {
    if user() != "0" {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let line = users.lines().find(|line| line.starts_with("postgres:"))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Our numeric user id.
fn user() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_whitespace().next().unwrap_or("0").to_owned()
}

/// Runs a statement in the database of a test.
pub(super) async fn execute_in(url: &str, sql: &str) {
    let mut conn = AsyncPgConnection::establish(url).await.expect("the test database answers");
    conn.batch_execute(sql).await.expect("the statement runs");
}
