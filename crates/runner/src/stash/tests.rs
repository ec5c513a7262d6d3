use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::*;

/// Keeps archives in memory, one scope, first save wins.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) caches: Mutex<BTreeMap<String, Vec<u8>>>,
    pub(crate) artifacts: Mutex<BTreeMap<String, Vec<u8>>>,
    sent: Mutex<BTreeMap<String, Vec<u8>>>,
    /// So many transfers break in the middle.
    pub(crate) breaks: Mutex<u32>,
}

fn archive(name: &str, bytes: &[u8]) -> Archive {
    Archive { place: Place(name.to_owned()), size: bytes.len() as u64, sha256: hex::encode(Sha256::digest(bytes)) }
}

impl Memory {
    fn breaks_now(&self) -> bool {
        let mut left = self.breaks.lock().expect("lock");
        let now = *left > 0;
        *left = left.saturating_sub(1);
        now
    }

    fn target(&self, name: &str) -> Target {
        Target { id: name.to_owned(), place: Place(name.to_owned()), max_bytes: 10 << 20 }
    }

    fn take(&self, name: &str, sha256: &str) -> Vec<u8> {
        let bytes = self.sent.lock().expect("lock").remove(name).expect("it was sent");
        assert_eq!(hex::encode(Sha256::digest(&bytes)), sha256);
        bytes
    }
}

#[async_trait]
impl Depot for Memory {
    async fn find_cache(&self, key: &str, restore_keys: &[String]) -> Result<Option<(String, Archive)>, DepotError> {
        let caches = self.caches.lock().expect("lock");
        let by_prefix = || {
            restore_keys.iter().find_map(|prefix| caches.keys().find(|key| key.starts_with(prefix.as_str()))).cloned()
        };
        let found = if caches.contains_key(key) { Some(key.to_owned()) } else { by_prefix() };
        Ok(found.map(|key| (key.clone(), archive(&format!("c/{key}"), &caches[&key]))))
    }

    async fn begin_cache(&self, key: &str) -> Result<Option<Target>, DepotError> {
        Ok((!self.caches.lock().expect("lock").contains_key(key)).then(|| self.target(key)))
    }

    async fn commit_cache(&self, target: &Target, key: &str, sha256: &str) -> Result<bool, DepotError> {
        let bytes = self.take(&target.id, sha256);
        Ok(self.caches.lock().expect("lock").insert(key.to_owned(), bytes).is_none())
    }

    async fn begin_artifact(&self, name: &str, _: Option<u64>) -> Result<Target, DepotError> {
        Ok(self.target(name))
    }

    async fn commit_artifact(&self, target: &Target, name: &str, sha256: &str) -> Result<(), DepotError> {
        let bytes = self.take(&target.id, sha256);
        self.artifacts.lock().expect("lock").insert(name.to_owned(), bytes);
        Ok(())
    }

    async fn find_artifact(&self, name: &str, _: Option<&str>) -> Result<Option<Archive>, DepotError> {
        Ok(self.artifacts.lock().expect("lock").get(name).map(|bytes| archive(&format!("a/{name}"), bytes)))
    }

    async fn fetch(&self, wanted: &Archive) -> Result<Pieces, DepotError> {
        let (kind, name) = wanted.place.0.split_once('/').expect("a kind");
        let shelf = if kind == "c" { &self.caches } else { &self.artifacts };
        let bytes = shelf.lock().expect("lock")[name].clone();
        let mut pieces: Vec<Result<Bytes, std::io::Error>> =
            bytes.chunks(100).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        if self.breaks_now() {
            pieces.truncate(pieces.len() / 2);
            pieces.push(Err(std::io::Error::other("cut")));
        }
        Ok(futures::stream::iter(pieces).boxed())
    }

    async fn send(&self, target: &Target, mut pieces: Pieces) -> Result<(), DepotError> {
        if self.breaks_now() {
            return Err(DepotError::Unavailable("cut".to_owned()));
        }
        let mut all = Vec::new();
        while let Some(piece) = pieces.next().await {
            all.extend_from_slice(&piece.map_err(|error| DepotError::Unavailable(error.to_string()))?);
        }
        self.sent.lock().expect("lock").insert(target.id.clone(), all);
        Ok(())
    }
}

struct Site {
    dir: TempDir,
    memory: Arc<Memory>,
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["workspace", "home"] {
            fs::create_dir(dir.path().join(name)).expect("made");
        }
        Self { dir, memory: Arc::default() }
    }

    fn stash(&self) -> Stash {
        let at = |name: &str| self.dir.path().join(name);
        let home = Home { dir: at("home"), writable: vec![at("home")], hidden: vec![at("home/.agent/state")] };
        Stash::new(self.memory.clone(), at("workspace"), Some(home), at("scratch"), Arc::default())
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, text).expect("written");
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.dir.path().join(name)).ok()
    }
}

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

/// Acceptance 21 of the agent's specification, and its traps T9 and T10.
#[tokio::test]
async fn acceptance_21_a_cache_replaces_exactly_its_paths_and_nothing_beside_or_above_them() {
    let one = Site::new();
    one.write("home/.a/b/c/old", "cached");
    one.write("workspace/target/x", "built");
    let paths = texts(&["~/.a/b/c", "target"]);
    assert!(matches!(one.stash().save("k", &paths).await.expect("saved"), Saved::Stored { files: 2, .. }));

    let two = Site { memory: one.memory.clone(), ..Site::new() };
    two.write("home/.a/other", "mine");
    two.write("home/.a/b/beside", "mine");
    two.write("home/.a/b/c/new", "gone after");
    two.write("workspace/src/main.rs", "mine");
    let stash = two.stash();
    let found = stash.restore("k", &[], &paths).await.expect("restored");
    assert_eq!((found.matched_key.as_deref(), found.exact, found.files), (Some("k"), true, 2));
    for (name, text) in [
        ("home/.a/other", Some("mine")),
        ("home/.a/b/beside", Some("mine")),
        ("home/.a/b/c/old", Some("cached")),
        ("home/.a/b/c/new", None),
        ("workspace/src/main.rs", Some("mine")),
        ("workspace/target/x", Some("built")),
    ] {
        assert_eq!(two.read(name).as_deref(), text, "{name}");
    }
    // Nothing is left of the work, neither in the scratch nor beside the targets.
    assert_eq!(fs::read_dir(two.dir.path().join("home/.a/b")).expect("there").count(), 2);
    assert!(stash.found_exactly("k"));
    assert_eq!(stash.save("k", &paths).await.expect("asked"), Saved::Exists);
    // Only what is asked for comes back, whatever the archive holds.
    let three = Site { memory: one.memory.clone(), ..Site::new() };
    three.stash().restore("k", &[], &texts(&["target"])).await.expect("restored");
    assert_eq!((three.read("home/.a/b/c/old"), three.read("workspace/target/x").as_deref()), (None, Some("built")));
}

#[tokio::test]
async fn restore_keys_are_tried_in_order_and_a_miss_is_no_fault() {
    let site = Site::new();
    site.write("workspace/t/x", "1");
    let stash = site.stash();
    stash.save("cargo-1", &texts(&["t"])).await.expect("saved");
    let found = stash.restore("cargo-2", &texts(&["nope-", "cargo-"]), &texts(&["t"])).await.expect("restored");
    assert_eq!((found.matched_key.as_deref(), found.exact), (Some("cargo-1"), false));
    assert!(!stash.found_exactly("cargo-2"));
    let missed = stash.restore("other", &[], &texts(&["t"])).await.expect("asked");
    assert_eq!(missed, Restored::default());
    assert_eq!(stash.save("none", &texts(&["nothing"])).await.expect("asked"), Saved::Empty);
}

#[tokio::test]
async fn paths_that_leave_and_links_on_the_way_are_refused() {
    let site = Site::new();
    site.write("workspace/t/x", "1");
    let stash = site.stash();
    site.write("home/.agent/state/token", "secret");
    for path in ["/etc", "../x", "~/../x", "~", ".", "~/.agent", "~/.agent/state", "~/.agent/state/token"] {
        assert!(matches!(stash.save("k", &texts(&[path])).await, Err(StashError::Bad(_))), "{path}");
        assert!(matches!(stash.restore("k", &[], &texts(&[path])).await, Err(StashError::Bad(_))), "{path}");
    }
    stash.save("k", &texts(&["t"])).await.expect("saved");
    fs::create_dir(site.dir.path().join("elsewhere")).expect("made");
    site.write("elsewhere/x", "mine");
    fs::remove_dir_all(site.dir.path().join("workspace/t")).expect("removed");
    // The target itself is a link: it is replaced, what it points to is not.
    symlink(site.dir.path().join("elsewhere"), site.dir.path().join("workspace/t")).expect("made");
    stash.restore("k", &[], &texts(&["t"])).await.expect("restored");
    assert_eq!((site.read("elsewhere/x").as_deref(), site.read("workspace/t/x").as_deref()), (Some("mine"), Some("1")));
    // A link above the target is not gone through.
    site.write("workspace/deep/t/x", "1");
    stash.save("deep", &texts(&["deep/t"])).await.expect("saved");
    fs::remove_dir_all(site.dir.path().join("workspace/deep")).expect("removed");
    symlink(site.dir.path().join("elsewhere"), site.dir.path().join("workspace/deep")).expect("made");
    let error = stash.restore("deep", &[], &texts(&["deep/t"])).await.expect_err("a link").to_string();
    assert!(error.contains("is not gone through"), "{error}");
    assert!(!site.dir.path().join("elsewhere/t").exists());
}

#[tokio::test(start_paused = true)]
async fn a_transfer_that_breaks_is_tried_again_in_a_fresh_directory_and_a_wrong_archive_is_never_used() {
    let site = Site::new();
    site.write("workspace/t/x", "1");
    let stash = site.stash();
    *site.memory.breaks.lock().expect("lock") = 2;
    assert!(matches!(stash.save("k", &texts(&["t"])).await.expect("saved"), Saved::Stored { .. }));
    *site.memory.breaks.lock().expect("lock") = 2;
    assert!(stash.restore("k", &[], &texts(&["t"])).await.expect("restored").exact);
    *site.memory.breaks.lock().expect("lock") = 3;
    assert!(matches!(
        stash.restore("k", &[], &texts(&["t"])).await,
        Err(StashError::Depot(DepotError::Unavailable(_)))
    ));
    assert_eq!(site.read("workspace/t/x").as_deref(), Some("1"));
}

#[tokio::test]
async fn a_hostile_archive_changes_nothing() {
    let site = Site::new();
    site.write("workspace/t/x", "mine");
    let raw = {
        let mut raw = vec![0_u8; 512];
        raw[..8].copy_from_slice(b"../../xx");
        raw[124..135].copy_from_slice(b"00000000000");
        raw[156] = b'0';
        raw[148..156].copy_from_slice(b"        ");
        let sum: u32 = raw.iter().map(|b| u32::from(*b)).sum();
        raw[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        raw.extend([0; 1024]);
        zstd::bulk::compress(&raw, 1).expect("packed")
    };
    site.memory.caches.lock().expect("lock").insert("k".to_owned(), raw.clone());
    site.memory.artifacts.lock().expect("lock").insert("a".to_owned(), raw);
    let stash = site.stash();
    for error in [
        stash.restore("k", &[], &texts(&["t"])).await.expect_err("refused"),
        stash.download("a", None, "").await.expect_err("refused"),
    ] {
        assert!(error.to_string().contains("climbs out"), "{error}");
    }
    assert_eq!(site.read("workspace/t/x").as_deref(), Some("mine"));
    assert!(!site.dir.path().join("xx").exists());
}

#[tokio::test]
async fn artifacts_go_to_a_directory_and_join_what_is_there() {
    let site = Site::new();
    for name in ["workspace/dist/a.whl", "workspace/dist/deep/b.whl", "workspace/dist/c.txt"] {
        site.write(name, name);
    }
    let stash = site.stash();
    let saved = stash.upload("wheels", &texts(&["dist/**/*.whl"]), None).await.expect("uploaded");
    assert!(matches!(saved, Saved::Stored { files: 2, .. }));
    assert_eq!(stash.upload("none", &texts(&["*.nothing"]), None).await.expect("asked"), Saved::Empty);
    for (name, path) in [("../x", "a"), ("", "a"), ("ok", "../a"), ("ok", "/abs")] {
        assert!(matches!(stash.upload(name, &texts(&[path]), None).await, Err(StashError::Bad(_))), "{name} {path}");
    }
    let other = Site { memory: site.memory.clone(), ..Site::new() };
    other.write("workspace/in/dist/mine", "mine");
    other.write("workspace/in/dist/a.whl", "old");
    let stash = other.stash();
    stash.download("wheels", None, "in").await.expect("downloaded");
    assert_eq!(other.read("workspace/in/dist/a.whl").as_deref(), Some("workspace/dist/a.whl"));
    assert_eq!(other.read("workspace/in/dist/mine").as_deref(), Some("mine"));
    assert_eq!(other.read("workspace/in/dist/c.txt"), None);
    assert!(stash.download("missing", Some("build"), "").await.expect_err("none").to_string().contains("job `build`"));
}
