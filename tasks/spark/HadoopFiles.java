package lakevision;

import java.util.ArrayDeque;
import java.util.Iterator;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.concurrent.ThreadFactory;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.FutureDataInputStreamBuilder;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RemoteIterator;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.function.FlatMapFunction;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.RowFactory;
import org.apache.spark.util.SerializableConfiguration;
import org.apache.spark.util.TaskCompletionListener;

/**
 * Lists a folder of any Hadoop file system on the driver, and reads its files in Spark's tasks.
 *
 * Compiled on first use by Janino, the compiler that Spark includes for its own generated code. Janino supports
 * neither lambdas nor inferred type arguments, so there are none here.
 */
public final class HadoopFiles implements FlatMapFunction {
    /** Maximum number of concurrent reads per task: an object store answers a request in tens of milliseconds. */
    private static final int MAX_FILES = 16;
    /** Maximum number of bytes of the concurrent reads, not counting the last. */
    private static final long MAX_BYTES = 64L << 20;

    private final SerializableConfiguration settings;
    private final String root;
    private final long maxBytes;

    /** Creates a reader of the files below the root; files of more than maxBytes bytes are not read. */
    public HadoopFiles(Configuration settings, String root, long maxBytes) {
        this.settings = new SerializableConfiguration(settings);
        this.root = root;
        this.maxBytes = maxBytes;
    }

    /** Returns why the folder cannot be listed, as "class: message" lines, outermost cause first; empty if it can. */
    public static String problem(Configuration settings, String root) {
        FileSystem system = null;
        try {
            Path folder = new Path(root);
            // A new instance: settings with few retries must not stay in Hadoop's cache of file systems.
            system = FileSystem.newInstance(folder.toUri(), settings);
            if (!system.getFileStatus(folder).isDirectory()) {
                return "NotDirectoryException: " + root;
            }
            // S3A takes a bucket's root for a folder without a request; only a listing finds a missing bucket.
            system.listStatusIterator(folder).hasNext();
            return "";
        } catch (Throwable error) {  // A connector with incompatible jars fails with an Error.
            return chain(error);
        } finally {
            close(system);
        }
    }

    private static void close(FileSystem system) {
        try {
            if (system != null) system.close();
        } catch (java.io.IOException ignored) {
            // Used for reading only: nothing is lost.
        }
    }

    private static String chain(Throwable error) {
        StringBuilder text = new StringBuilder();
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            if (text.length() > 0) text.append('\n');
            text.append(cause.getClass().getSimpleName()).append(": ").append(firstLine(cause.getMessage()));
        }
        return text.toString();
    }

    private static String firstLine(String message) {
        return message == null ? "" : message.split("\n", 2)[0];
    }

    /** All files below a folder, in pages: one call from Python per file would take a millisecond each. */
    public static final class Listing {
        private RemoteIterator files;
        private String prefix;
        private String problem = "";

        public Listing(Configuration settings, String root) {
            try {
                Path folder = new Path(root);
                FileSystem system = folder.getFileSystem(settings);
                String path = system.makeQualified(folder).toUri().getPath();
                prefix = path.endsWith("/") ? path : path + "/";
                files = system.listFiles(folder, true);
            } catch (Throwable error) {
                problem = chain(error);
            }
        }

        /** Returns why the listing ended before its end, as lines of chain; empty if it did not. */
        public String problem() {
            return problem;
        }

        /** Returns "size TAB milliseconds TAB path" of up to `maxFiles` files, each terminated by NUL; empty at the end. */
        public String page(int maxFiles) {
            StringBuilder text = new StringBuilder();
            try {
                for (int count = 0; problem.isEmpty() && count < maxFiles && files.hasNext();) {
                    FileStatus file = (FileStatus) files.next();
                    String path = file.getPath().toUri().getPath();
                    // Hadoop resolves a key with /../ to a path outside the root.
                    if (!path.startsWith(prefix)) continue;
                    text.append(file.getLen()).append('\t').append(file.getModificationTime()).append('\t');
                    text.append(path.substring(prefix.length())).append('\0');
                    count++;
                }
            } catch (Throwable error) {
                problem = chain(error);
                return "";
            }
            return text.toString();
        }
    }

    /** Returns the first bytes of a file of a known size; all of them if that is as many. */
    private static byte[] read(Configuration settings, Path path, long size, int wanted, String policy) throws Exception {
        FutureDataInputStreamBuilder open = path.getFileSystem(settings).openFile(path);
        // With the length from the listing, a store gets one request per file instead of two.
        open.opt("fs.option.openfile.length", String.valueOf(size));
        open.opt("fs.option.openfile.read.policy", policy);
        FSDataInputStream stream = (FSDataInputStream) open.build().get();
        try {
            byte[] content = new byte[wanted];
            int filled = 0;
            while (filled < content.length) {
                int count = stream.read(content, filled, content.length - filled);
                if (count < 0) break;
                filled += count;
            }
            if (filled < content.length) throw new java.io.IOException("the file changed while it was read");
            return content;
        } finally {
            stream.close();
        }
    }

    private static ExecutorService newThreads() {
        return Executors.newFixedThreadPool(MAX_FILES, new ThreadFactory() {
            public Thread newThread(Runnable work) {
                Thread thread = new Thread(work, "lakevision-read");
                thread.setDaemon(true);
                return thread;
            }
        });
    }

    /**
     * Returns the first bytes of files, each after their number as an int; it is -1 for a file that cannot be read.
     *
     * The files are "size TAB path" lines, separated by NUL.
     */
    public static byte[] heads(final Configuration settings, final String root, String files, final int most)
            throws Exception {
        ExecutorService threads = newThreads();
        try {
            ArrayDeque underWay = new ArrayDeque();
            String[] lines = files.split("\0");
            for (int i = 0; i < lines.length; i++) {
                final int tab = lines[i].indexOf('\t');
                final long size = Long.parseLong(lines[i].substring(0, tab));
                final String path = "./" + lines[i].substring(tab + 1);
                FutureTask task = new FutureTask(new Callable() {
                    public Object call() throws Exception {
                        return read(settings, new Path(root, path), size, (int) Math.min(size, (long) most), "random");
                    }
                });
                threads.execute(task);
                underWay.add(task);
            }
            java.io.ByteArrayOutputStream bytes = new java.io.ByteArrayOutputStream();
            java.io.DataOutputStream found = new java.io.DataOutputStream(bytes);
            while (!underWay.isEmpty()) {
                try {
                    byte[] head = (byte[]) ((Future) underWay.remove()).get();
                    found.writeInt(head.length);
                    found.write(head);
                } catch (java.util.concurrent.ExecutionException error) {
                    found.writeInt(-1);
                }
            }
            return bytes.toByteArray();
        } finally {
            threads.shutdownNow();
        }
    }

    /** Adds the columns content and unreadable (the reason) to rows with path and size; keeps their order. */
    public Iterator call(Object rows) {
        return new Reading((Iterator) rows, settings.value(), root, maxBytes);
    }

    /** Reads ahead: the next files are read while Python processes the previous ones. */
    private static final class Reading implements Iterator {
        private final Iterator rows;
        private final Configuration settings;
        private final String root;
        private final long maxBytes;
        private final ExecutorService threads;
        private final ArrayDeque underWay = new ArrayDeque();
        private final ArrayDeque sizes = new ArrayDeque();
        private long bytes = 0;

        Reading(Iterator rows, Configuration settings, String root, long maxBytes) {
            this.rows = rows;
            this.settings = settings;
            this.root = root;
            this.maxBytes = maxBytes;
            final ExecutorService pool = newThreads();
            this.threads = pool;
            TaskContext.get().addTaskCompletionListener(new TaskCompletionListener() {
                public void onTaskCompletion(TaskContext context) {
                    pool.shutdownNow();
                }
            });
        }

        public boolean hasNext() {
            while (rows.hasNext() && underWay.size() < MAX_FILES && (underWay.isEmpty() || bytes < MAX_BYTES)) {
                Row row = (Row) rows.next();
                long size = ((Long) row.getAs("size")).longValue();
                FutureTask task = new FutureTask(new Read(row, settings, root, maxBytes));
                threads.execute(task);
                underWay.add(task);
                sizes.add(Long.valueOf(size));
                bytes += size;
            }
            return !underWay.isEmpty();
        }

        public Object next() {
            if (!hasNext()) throw new java.util.NoSuchElementException();
            bytes -= ((Long) sizes.remove()).longValue();
            try {
                return ((Future) underWay.remove()).get();
            } catch (Exception error) {
                throw new RuntimeException(error);
            }
        }

        public void remove() {
            throw new UnsupportedOperationException();
        }
    }

    private static final class Read implements Callable {
        private final Row row;
        private final Configuration settings;
        private final String root;
        private final long maxBytes;

        Read(Row row, Configuration settings, String root, long maxBytes) {
            this.maxBytes = maxBytes;
            this.row = row;
            this.settings = settings;
            this.root = root;
        }

        public Object call() {
            Object[] values = new Object[row.size() + 2];
            for (int i = 0; i < row.size(); i++) values[i] = row.get(i);
            try {
                long size = ((Long) row.getAs("size")).longValue();
                if (size > maxBytes) throw new java.io.IOException("the file has more than " + maxBytes + " bytes");
                values[row.size()] = read(settings, new Path(root, "./" + row.getAs("path")), size, (int) size, "whole-file");
            } catch (Exception error) {
                Throwable cause = error;
                while (cause instanceof java.util.concurrent.ExecutionException && cause.getCause() != null) {
                    cause = cause.getCause();
                }
                values[row.size() + 1] = cause.getClass().getSimpleName() + ": " + firstLine(cause.getMessage());
            }
            return RowFactory.create(values);
        }

    }
}
